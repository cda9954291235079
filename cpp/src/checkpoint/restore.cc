// From row files to a table.
#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "checkpoint/staged_rows.h"
#include "kernels/optimizer_step.h"
#include "recsdk/checkpoint.h"
#include "table/table_impl.h"
#include "util/must.h"

namespace recsdk {

using internal::StagedRows;

namespace {

[[noreturn, gnu::cold]] void throw_unfit(const Table::Impl& table, const std::string& file,
                                         const std::string& what) {
  throw Error(ErrorCode::kCheckpoint, table.title() + ": '" + file + "' " + what);
}

std::string describe(const std::vector<FileField>& fields) {
  std::string text;
  for (const FileField& field : fields) {
    text += (text.empty() ? "" : ", ") + field.name + " " + name_of(field.type) + "[" +
            std::to_string(field.count) + "]";
  }
  return text;
}

// The fields that are no metadata of eviction.
std::vector<FileField> without_meta(const std::vector<FileField>& fields) {
  std::vector<FileField> kept;
  std::copy_if(fields.begin(), fields.end(), std::back_inserter(kept),
               [](const FileField& field) { return !internal::meta_kind(field); });
  return kept;
}

// Refuses files whose rows have other fields than the table's, but for metadata of eviction.
void check_fields(const Table::Impl& table, const RowFileReader& file, bool drop_state) {
  const RowFileHeader& header = file.header();
  if (header.dim != table.layout.dim) {
    throw_unfit(table, file.name(),
                "has rows of width " + std::to_string(header.dim) + ", and the table's are " +
                    std::to_string(table.layout.dim) + " wide; load it into a table of its width");
  }
  const std::vector<FileField> wanted = internal::file_fields(table.layout);
  if (header.fields[0].type != wanted[0].type) {
    throw_unfit(table, file.name(),
                std::string("has weights of type ") + name_of(header.fields[0].type) +
                    ", and the table's are " + name_of(wanted[0].type) +
                    "; load it into a table of its type");
  }
  if (drop_state || without_meta(header.fields) == wanted) return;
  throw_unfit(table, file.name(),
              "has the fields " + describe(header.fields) + ", and the table's are " +
                  describe(wanted) +
                  "; load it into a table with the same optimizer, or drop the state");
}

// Where files of these fields have what rows take from them. Metadata must be all there, or none.
StagedRows::Places places_in(const Table::Impl& table, const RowFileReader& file,
                             const RestoreOptions& options) {
  const std::vector<FileField>& fields = file.header().fields;
  StagedRows::Places places;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    if (!internal::meta_kind(fields[f])) places.fields.push_back(f);
  }
  const bool has_none = places.fields.size() == fields.size();
  if (!table.index.evictor || has_none || options.drop_metadata) return places;
  for (const internal::MetaKind kind : table.index.evictor->meta().kinds()) {
    const FileField wanted = internal::file_field(kind);
    const auto found = std::find(fields.begin(), fields.end(), wanted);
    if (found == fields.end()) {
      throw_unfit(table, file.name(),
                  "was saved with another rule of eviction, and lacks " + wanted.name +
                      ", which the table's needs; load it into a table with the rule it was saved "
                      "with, or drop the metadata");
    }
    places.meta.push_back(static_cast<std::size_t>(found - fields.begin()));
  }
  return places;
}

void check_options(const Table::Impl& table, const RestoreOptions& options) {
  if (!options.owned.empty() &&
      static_cast<std::int64_t>(options.owned.size()) != kNumVirtualShards) {
    throw std::invalid_argument(
        table.title() + ": " +
        internal::must("owned",
                       "have one element per virtual shard, " + std::to_string(kNumVirtualShards),
                       options.owned.size()));
  }
  if (options.modulo && (options.modulo->rank < 0 || options.modulo->rank >= options.modulo->world))
    throw std::invalid_argument(table.title() + ": " +
                                internal::must("rank of modulo",
                                               "be 0 to world - 1, with a world of " +
                                                   std::to_string(options.modulo->world),
                                               options.modulo->rank));
}

// The share of keys that are kept, assuming that keys are spread evenly.
double share_of(const RestoreOptions& options) {
  double share = 1.0;
  if (!options.owned.empty()) {
    const auto num_owned = std::count_if(options.owned.begin(), options.owned.end(),
                                         [](std::uint8_t is_owned) { return is_owned != 0; });
    share = static_cast<double>(num_owned) / static_cast<double>(kNumVirtualShards);
  }
  return options.modulo ? share / static_cast<double>(options.modulo->world) : share;
}

}  // namespace

struct Restore::Impl {
  explicit Impl(std::shared_ptr<Table::Impl> target)
      : table(std::move(target)),
        row_fields(table->file_fields()),
        staged(std::make_unique<StagedRows>(*table)),
        shared(table->make_shared()) {}

  // A snapshot begins anew; it must not come after anything but its own other files.
  void begin_file(const RowFileReader& file, const RestoreOptions& options) {
    const RowFileHeader& header = file.header();
    if (header.kind == RowFileKind::kSnapshot && token && *token != header.token) {
      throw_unfit(*table, file.name(),
                  "is a snapshot of another save than the files before it; restore one save and "
                  "the deltas after it");
    }
    if (token == header.token && kind != header.kind)
      throw_unfit(
          *table, file.name(),
          "has the token of a file before it, and one is a snapshot's, the other a delta's; "
          "write each save with a token of its own");
    if (token != header.token) {
      staged->begin_save();
    }
    token = header.token;
    kind = header.kind;
    staged->places = places_in(*table, file, options);
    const auto expected = static_cast<double>(std::min(file.expected_rows(), internal::kMaxRows));
    staged->expect(static_cast<std::int64_t>(expected * share_of(options)));
  }

  // Calls `add`; if it throws, the restore has failed.
  template <typename Add>
  void attempt(const Add& add) {
    has_failed = true;  // unless it gets through
    try {
      add();
    } catch (...) {
      staged->stop();
      throw;
    }
    has_failed = false;
  }

  void add_blocks(RowFileReader& file, const RestoreOptions& options) {
    RowBlock block;
    while (file.next(block)) {
      if (block.kind == BlockKind::kRows) {
        staged->add_rows(block, file.name(), options);
      } else {
        staged->erase(block, file.name(), options);
      }
    }
    staged->settle();
  }

  void require_usable() const;
  void add_rows(std::span<const Key> keys, std::span<const void* const> fields,
                const RestoreOptions& options);
  void check(std::uint64_t update_count, double log_decay);
  void commit(std::uint64_t update_count, double log_decay, const EvictionState& state);

  std::shared_ptr<Table::Impl> table;
  const std::vector<FileField> row_fields;
  std::unique_ptr<StagedRows> staged;  // null once committed
  std::vector<AdmitRecord> records;
  std::optional<internal::SharedStore> shared;
  std::optional<std::array<std::uint8_t, 16>> token;
  RowFileKind kind = RowFileKind::kSnapshot;
  bool has_failed = false;
};

void Restore::Impl::require_usable() const {
  if (!has_failed && staged != nullptr) return;
  throw std::invalid_argument(table->title() +
                              ": this restore has failed or is committed; begin another one");
}

void Restore::Impl::add_rows(std::span<const Key> keys, std::span<const void* const> fields,
                             const RestoreOptions& options) {
  if (token) {
    throw std::invalid_argument(table->title() +
                                ": rows from memory must not follow files; begin another restore");
  }
  const std::size_t wanted = options.drop_state ? 1 : row_fields.size();
  if (fields.size() != wanted) {
    throw std::invalid_argument(
        table->title() + ": " +
        internal::must("fields", "have one array per field, " + std::to_string(wanted),
                       fields.size()));
  }
  RowBlock block;
  block.keys = keys;
  for (const void* const field : fields)
    block.fields.push_back(static_cast<const std::byte*>(field));
  if (staged->numbers.end() == 0) staged->begin_save();
  const std::size_t num_fields = table->layout.fields.size();
  staged->places = {};
  for (std::size_t f = 0; f < fields.size(); ++f)
    (f < num_fields ? staged->places.fields : staged->places.meta).push_back(f);
  attempt([&] {
    staged->expect(static_cast<std::int64_t>(keys.size()));
    staged->add_rows(block, "rows in memory", options);
    staged->settle();
  });
}

// Checks what does not depend on what the table is doing.
void Restore::Impl::check(std::uint64_t update_count, double log_decay) {
  internal::check_update_count(update_count, table->title());
  table->check_log_decay(log_decay);
  attempt([&] { staged->fit(); });
  const std::int64_t num_rows = staged->key_map->size();
  if (table->config.max_rows && num_rows > *table->config.max_rows) {
    throw Error(ErrorCode::kCapacity, table->title() + ": the files hold " +
                                          std::to_string(num_rows) + " rows, and max_rows is " +
                                          std::to_string(*table->config.max_rows) +
                                          "; raise max_rows, or load into more ranks");
  }
  table->index.check_room(staged->numbers);
}

void Restore::Impl::commit(std::uint64_t update_count, double log_decay,
                           const EvictionState& state) {
  check(update_count, log_decay);
  table->index.check_time("the clock's time", state.time);
  const std::unique_ptr<internal::Admission> admission = table->index.empty_admission();
  if (admission != nullptr) admission->assign(records);
  auto tracker = std::make_unique<internal::ChangeTracker>(table->index.hash_seed);
  tracker->grow(staged->numbers.end());
  for (const Key key : staged->evicted) tracker->note_left(key, LeaveCause::kEvicted);
  internal::CutMemory::Parts kept;  // freed without locks
  const std::unique_lock lock(table->index.mutex);
  table->index.require_idle("a restore");
  table->let_wait(staged->numbers.end());
  table->index.let_measure(staged->numbers.end());
  const std::unique_lock rows_lock(table->rows_mutex);
  table->index.replace(*staged->key_map, staged->numbers, tracker);
  table->rows.swap(staged->rows);
  std::swap(table->shared, shared);
  table->waiting.clear();
  if (admission != nullptr) table->index.admission->replace_by(*admission);
  table->index.set_state(state);
  table->index.num_evicted += staged->evicted.size();
  kept = table->cut_memory.forget();
  table->update_count = update_count;
  table->log_decay = log_decay;
}

Restore::Restore(const Table& table) : impl_(std::make_unique<Impl>(TableAccess::share(table))) {}
Restore::Restore(Restore&&) noexcept = default;
Restore& Restore::operator=(Restore&&) noexcept = default;
Restore::~Restore() = default;

void Restore::add_file(RowFileReader& file, const RestoreOptions& options) {
  Impl& r = *impl_;
  check_options(*r.table, options);
  r.require_usable();
  if (!file.is_at_start())
    throw std::invalid_argument("'" + file.name() + "' was read before; open it again");
  r.attempt([&] {
    check_fields(*r.table, file, options.drop_state);
    r.begin_file(file, options);
    r.add_blocks(file, options);
  });
}

void Restore::add_records(std::span<const AdmitRecord> records) {
  Impl& r = *impl_;
  r.require_usable();
  if (!r.table->index.admission) {
    throw std::invalid_argument(r.table->title() +
                                ": counts of keys without a row need a rule of admission; set it, "
                                "or leave them out");
  }
  r.attempt([&] {
    r.records.insert(r.records.end(), records.begin(), records.end());
    r.table->index.admission->check(r.records, r.table->title());
  });
}

void Restore::add_shared(std::span<const Key> keys, const float* weights, const float* state) {
  Impl& r = *impl_;
  r.require_usable();
  if (r.shared && r.shared->write(keys, weights, state)) return;
  throw std::invalid_argument(
      r.table->title() + ": " + std::to_string(keys.size()) +
      " rows that keys without one share were given, and " +
      (r.shared ? "some are none of its " + std::to_string(r.shared->size())
                : std::string("it has no such rows")) +
      "; load them into a table with as many shared rows, or leave them out");
}

const std::vector<FileField>& Restore::fields() const { return impl_->row_fields; }
std::int64_t Restore::num_rows() const {
  return impl_->staged == nullptr ? 0 : impl_->staged->key_map->size();
}

void Restore::add_rows(std::span<const Key> keys, std::span<const void* const> fields,
                       const RestoreOptions& options) {
  check_options(*impl_->table, options);
  impl_->require_usable();
  impl_->add_rows(keys, fields, options);
}

void Restore::check(std::uint64_t update_count, double log_decay) const {
  impl_->require_usable();
  impl_->check(update_count, log_decay);
  const std::unique_lock lock(impl_->table->index.mutex);
  impl_->table->index.require_idle("a restore");
}

void Restore::commit(std::uint64_t update_count, double log_decay, const EvictionState& state) {
  impl_->require_usable();
  impl_->commit(update_count, log_decay, state);
  impl_->staged.reset();  // what the table had before is freed without its locks
}

}  // namespace recsdk
