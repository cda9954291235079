// From a cut to a row file.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/row_file_writer.h"
#include "recsdk/checkpoint.h"
#include "table/cut.h"

namespace recsdk {
namespace {

RowFileHeader header_of(const Cut::Impl& cut, const WriteOptions& options) {
  RowFileHeader header;
  header.kind = cut.changes_only ? RowFileKind::kDelta : RowFileKind::kSnapshot;
  header.dim = cut.table->layout.dim;
  header.token = options.token;
  header.fields = cut.table->file_fields();
  return header;
}

// Calls the progress function whenever more has been written.
class Progress {
 public:
  explicit Progress(const std::function<void(std::int64_t)>& report) : report_(report) {}
  void at(std::int64_t num_bytes) {
    if (report_ && num_bytes != last_) report_(num_bytes);
    last_ = num_bytes;
  }

 private:
  const std::function<void(std::int64_t)>& report_;
  std::int64_t last_ = 0;
};

void write_all_rows(Cut::Impl& cut, RowFileWriter& writer, Progress& progress) {
  RowFileWriter::Impl& blocks = RowFileAccess::impl(writer);
  const bool is_beside_updates = !blocks.options.in_background;
  if (is_beside_updates) blocks.set_pause([&cut] { cut.give_way(); });
  for (;;) {
    if (cut.state->has_copied()) {
      cut.stock(is_beside_updates);
    } else if (is_beside_updates) {
      cut.give_way();
    }
    const RowSlots slots = blocks.row_slots();
    const std::int64_t n = cut.read({slots.capacity, slots.keys, slots.fields});
    if (n == 0) return;
    blocks.commit_rows(n);
    progress.at(writer.num_bytes());
  }
}

void write_left(const Cut::Impl& cut, RowFileWriter& writer) {
  const std::vector<internal::LeftKey> left = cut.left_keys();
  std::vector<Key> keys;
  for (auto first = left.begin(); first != left.end();) {
    const auto last = std::find_if(first, left.end(),
                                   [&](const auto& each) { return each.cause != first->cause; });
    keys.clear();
    std::transform(first, last, std::back_inserter(keys),
                   [](const auto& each) { return each.key; });
    writer.write_erased(keys, first->cause);
    first = last;
  }
}

RowFileSummary write_file(Cut::Impl& cut, ByteSink& sink, const WriteOptions& options) {
  RowFileWriter writer(sink, header_of(cut, options), options.file);
  Progress progress(options.progress);
  write_all_rows(cut, writer, progress);
  if (cut.changes_only) write_left(cut, writer);
  progress.at(writer.num_bytes());
  const RowFileSummary summary = writer.finish();
  if (summary.num_rows != cut.num_rows) {
    throw Error(ErrorCode::kInternal, "a cut of " + std::to_string(cut.num_rows) + " rows gave " +
                                          std::to_string(summary.num_rows) +
                                          ": the file is of no use; save again, and report this");
  }
  progress.at(summary.num_bytes);
  return summary;
}

}  // namespace

RowFileSummary write_rows(Cut& cut, ByteSink& sink, const WriteOptions& options) {
  Cut::Impl& impl = CutAccess::impl(cut);
  if (impl.is_finished.load())
    throw std::invalid_argument("write_rows: the cut is finished; take another one");
  if (impl.is_begun.exchange(true))
    throw std::invalid_argument("write_rows: the cut was written already; take another one");
  try {
    return write_file(impl, sink, options);
  } catch (...) {
    cut.finish(false);  // so that no update waits for what nobody will read
    throw;
  }
}

}  // namespace recsdk
