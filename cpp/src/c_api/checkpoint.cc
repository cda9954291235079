// The functions of c_api.h that save and restore.
#include "recsdk/checkpoint.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "c_api/convert.h"
#include "c_api/status.h"
#include "recsdk/c_api.h"

struct recsdk_cut {
  recsdk::Cut cut;
  std::vector<recsdk_admit_record> records;  // of the cut's
};

struct recsdk_restore {
  recsdk::Restore restore;
};

namespace {

using recsdk::c_api::array;
using recsdk::c_api::check_reserved;
using recsdk::c_api::deref;
using recsdk::c_api::guarded;
using recsdk::c_api::read_struct;
using recsdk::c_api::struct_size;
using recsdk::c_api::write_struct;

class CallbackSink final : public recsdk::ByteSink {
 public:
  CallbackSink(recsdk_write_callback callback, void* user_data, std::string name)
      : callback_(callback), user_data_(user_data), name_(std::move(name)) {}

  void write(std::span<const std::byte> bytes) override {
    const int status = callback_(user_data_, bytes.data(), bytes.size());
    if (status == 0) return;
    throw recsdk::Error(recsdk::ErrorCode::kCheckpoint, "cannot write '" + name_ +
                                                            "': the callback returned " +
                                                            std::to_string(status) + ", not 0");
  }

 private:
  recsdk_write_callback callback_;
  void* user_data_;
  std::string name_;
};

std::unique_ptr<recsdk::ByteSink> sink_of(const recsdk_write_options& options) {
  const std::string name = &deref(options.name, "recsdk_write_options.name");
  if (options.callback != nullptr)
    return std::make_unique<CallbackSink>(options.callback, options.user_data, name);
  return std::make_unique<recsdk::FileSink>(options.descriptor, name);
}

recsdk::CutOptions cut_options(const recsdk_cut_options* given) {
  recsdk::CutOptions options;
  if (given == nullptr) return options;
  const recsdk_cut_options c = read_struct(given, {}, "recsdk_cut_options");
  options.changes_only = c.changes_only != 0;
  if (c.has_max_copy_bytes != 0) options.max_copy_bytes = c.max_copy_bytes;
  return options;
}

recsdk::RestoreOptions restore_options(const recsdk_restore_options* given) {
  recsdk::RestoreOptions options;
  if (given == nullptr) return options;
  const recsdk_restore_options c = read_struct(given, {}, "recsdk_restore_options");
  if (c.owned != nullptr) options.owned = array(c.owned, recsdk::kNumVirtualShards, "owned");
  if (c.has_modulo != 0)
    options.modulo = recsdk::RestoreOptions::Modulo{c.modulo_rank, c.modulo_world};
  options.drop_state = c.drop_state != 0;
  options.drop_metadata = c.drop_metadata != 0;
  check_reserved(c.reserved, "recsdk_restore_options.reserved");
  return options;
}

recsdk_write_options write_defaults() {
  recsdk_write_options options{};
  options.struct_size = sizeof(options);
  options.name = "row file";
  options.block_bytes = recsdk::kDefaultBlockBytes;
  options.descriptor = -1;
  return options;
}

constexpr const char* kSummary = "recsdk_row_file_summary";

void fill(recsdk_row_file_summary* summary, const recsdk::RowFileSummary& from) {
  if (summary == nullptr) return;
  recsdk_row_file_summary to = {.struct_size = sizeof(to),
                                .num_rows = from.num_rows,
                                .num_erased = from.num_erased,
                                .num_bytes = from.num_bytes,
                                .checksum = {}};
  std::copy_n(from.checksum.begin(), std::min(from.checksum.size(), std::size(to.checksum) - 1),
              to.checksum);
  write_struct(summary, to, kSummary);
}

}  // namespace

int recsdk_table_cut(recsdk_table* table, const recsdk_cut_options* options, recsdk_cut** cut) {
  return guarded([&] {
    recsdk::Table& of = deref(table, "table").table;
    recsdk_cut*& out = deref(cut, "cut");
    auto taken = std::make_unique<recsdk_cut>(recsdk_cut{of.cut(cut_options(options)), {}});
    if (taken->cut.admission()) {
      for (const recsdk::AdmitRecord& record : *taken->cut.admission())
        taken->records.push_back({record.key, record.count, record.step, record.clicks});
    }
    out = taken.release();
  });
}

int recsdk_cut_get_info(const recsdk_cut* cut, recsdk_cut_info* info) {
  return guarded([&] {
    const recsdk::Cut& from = deref(cut, "cut").cut;
    const recsdk_cut_info to = {.struct_size = sizeof(to),
                                .num_rows = from.num_rows(),
                                .num_erased = from.num_erased(),
                                .update_count = from.update_count(),
                                .log_decay = from.log_decay(),
                                .copied_bytes = from.copied_bytes(),
                                .max_copied_bytes = from.max_copied_bytes(),
                                .learning_rate = from.learning_rate(),
                                .changes_only = from.changes_only() ? 1 : 0,
                                .is_finished = from.is_finished() ? 1 : 0,
                                .reserved = 0};
    write_struct(info, to, "recsdk_cut_info");
  });
}

int recsdk_cut_get_clock(const recsdk_cut* cut, recsdk_clock* clock) {
  return guarded([&] {
    const std::optional<recsdk::EvictionState>& state = deref(cut, "cut").cut.eviction();
    if (!state)
      throw std::invalid_argument(
          "the table counts steps with eviction or admission only; set one of them");
    write_struct(clock, recsdk::c_api::clock_of(*state), "recsdk_clock");
  });
}

int recsdk_cut_get_records(const recsdk_cut* cut, const recsdk_admit_record** records,
                           int64_t* num_records) {
  return guarded([&] {
    const recsdk_cut& from = deref(cut, "cut");
    deref(records, "records");
    deref(num_records, "num_records");
    *records = from.records.data();
    *num_records = std::ssize(from.records);
  });
}

int recsdk_cut_get_shared(const recsdk_cut* cut, recsdk_shared_rows* shared) {
  return guarded([&] {
    const std::optional<recsdk::SharedRows>& from = deref(cut, "cut").cut.shared_rows();
    recsdk_shared_rows to{};
    to.struct_size = sizeof(to);
    if (from) {
      to.keys = from->keys.data();
      to.weights = from->weights.data();
      to.state = from->state.data();
      to.num_rows = std::ssize(from->keys);
    }
    write_struct(shared, to, "recsdk_shared_rows");
  });
}

int recsdk_cut_finish(recsdk_cut* cut, int durable) {
  return guarded([&] { deref(cut, "cut").cut.finish(durable != 0); });
}

void recsdk_cut_destroy(recsdk_cut* cut) { delete cut; }

int recsdk_write_options_init(recsdk_write_options* options) {
  return guarded([&] { write_struct(options, write_defaults(), "recsdk_write_options"); });
}

int recsdk_write_rows(recsdk_cut* cut, const recsdk_write_options* options,
                      recsdk_row_file_summary* summary) {
  return guarded([&] {
    recsdk::Cut& from = deref(cut, "cut").cut;
    const recsdk_write_options o = read_struct(options, write_defaults(), "recsdk_write_options");
    if (summary != nullptr) struct_size(summary, kSummary);
    const std::unique_ptr<recsdk::ByteSink> sink = sink_of(o);
    recsdk::WriteOptions write;
    std::copy(std::begin(o.token), std::end(o.token), write.token.begin());
    if (o.codec != RECSDK_CODEC_NONE && o.codec != RECSDK_CODEC_ZSTD)
      recsdk::c_api::reject_value("recsdk_write_options.codec", o.codec, "0 or 1");
    write.file.codec = static_cast<recsdk::Codec>(o.codec);
    write.file.block_bytes = o.block_bytes;
    write.file.in_background = o.callback == nullptr;
    fill(summary, recsdk::write_rows(from, *sink, write));
  });
}

int recsdk_restore_create(const recsdk_table* table, recsdk_restore** restore) {
  return guarded([&] {
    const recsdk::Table& of = deref(table, "table").table;
    recsdk_restore*& out = deref(restore, "restore");
    out = new recsdk_restore{recsdk::Restore(of)};
  });
}

int recsdk_restore_add_file(recsdk_restore* restore, int descriptor, int64_t size, const char* name,
                            const recsdk_restore_options* options,
                            recsdk_row_file_summary* summary) {
  return guarded([&] {
    recsdk::Restore& into = deref(restore, "restore").restore;
    if (summary != nullptr) struct_size(summary, kSummary);
    const std::string title = &deref(name, "name");
    const recsdk::RestoreOptions converted = restore_options(options);
    recsdk::RowFileReader file(std::make_shared<recsdk::FileSource>(descriptor, title), size,
                               title);
    into.add_file(file, converted);
    fill(summary, file.summary());
  });
}

int recsdk_restore_add_records(recsdk_restore* restore, const recsdk_admit_record* records,
                               int64_t num_records) {
  return guarded([&] {
    recsdk::Restore& to = deref(restore, "restore").restore;
    std::vector<recsdk::AdmitRecord> staged;
    for (const recsdk_admit_record& record : array(records, num_records, "records"))
      staged.push_back({record.key, record.count, record.step, record.clicks});
    to.add_records(staged);
  });
}

int recsdk_restore_add_shared(recsdk_restore* restore, const int64_t* keys, int64_t num_rows,
                              const float* weights, const float* state) {
  return guarded([&] {
    recsdk::Restore& to = deref(restore, "restore").restore;
    array(weights, num_rows, "weights");
    to.add_shared(array(keys, num_rows, "keys"), weights, state);
  });
}

int recsdk_restore_commit_at(recsdk_restore* restore, uint64_t update_count, double log_decay,
                             const recsdk_clock* clock) {
  return guarded([&] {
    recsdk::Restore& of = deref(restore, "restore").restore;
    of.commit(update_count, log_decay, recsdk::c_api::eviction_state(clock));
  });
}

int recsdk_restore_commit(recsdk_restore* restore, uint64_t update_count, double log_decay) {
  return guarded([&] { deref(restore, "restore").restore.commit(update_count, log_decay); });
}

void recsdk_restore_destroy(recsdk_restore* restore) { delete restore; }
