// The rows of an open cut: which still lie in their records as they were, and copies of the others.
//
// A row belongs to the cut from when it is marked until the reader passes it. Whoever is about to
// change a row copies it first (preserve_rows, plan), the reader takes rows in ascending order from
// records or copies (read). Records are read and copied under this object's mutex, and written only
// once the row is no longer pending. That covers updates, which hold rows_mutex, and insertions
// into rows used before, which hold the index's lock only. An update that copies holds the mutex to
// its end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bags/gradients.h"
#include "cut/copy_memory.h"
#include "cut/cut_memory.h"
#include "recsdk/row_layout.h"
#include "rows/row_bits.h"
#include "rows/row_numbers.h"
#include "rows/row_store.h"

namespace recsdk::internal {

/// A row's fields side by side without padding: how copies hold them.
class PackedRows {
 public:
  explicit PackedRows(const RowLayout& layout);
  std::int64_t row_bytes() const noexcept { return row_bytes_; }
  void pack(const RowAddresses& addresses, std::int64_t row, std::byte* out) const;

  struct Field {
    const RowField* field;
    std::size_t bytes;
    std::size_t offset;  // in a packed row
  };
  const std::vector<Field>& fields() const noexcept { return fields_; }

 private:
  std::vector<Field> fields_;
  std::int64_t row_bytes_ = 0;
};

/// Where the reader puts rows: arrays of keys and of each field.
struct RowArrays {
  std::int64_t capacity = 0;
  Key* keys = nullptr;
  std::span<std::byte* const> fields;
};

/// What eviction keeps of the rows of a cut, in ascending order of row number.
struct MetaCopy {
  std::vector<std::int64_t> words;  // (N, W)
  std::vector<std::size_t> bytes;   // (W,), of each word how many files have
};

/// How long updates waited because copies had reached their limit.
struct CopyWaits {
  std::atomic<std::uint64_t> count{0};
  std::atomic<std::uint64_t> nanoseconds{0};
};

class CutState {
 public:
  /// `bytes_at_once`: of the copies that one update may make, as far as seen. Takes the bits and
  /// the memory for copies out of `parts`.
  CutState(const RowLayout& layout, const RowNumbers& numbers, const RowStore& rows,
           std::optional<std::int64_t> max_copy_bytes, std::int64_t bytes_at_once,
           CutMemory::Parts& parts);
  CutState(const CutState&) = delete;
  CutState& operator=(const CutState&) = delete;
  ~CutState();

  /// Bytes that the copy of a row takes, with what says whose it is.
  static std::int64_t copy_bytes(const RowLayout& layout);

  /// Marks the visible rows, with `changed` only those whose bit is set; counts them. Before the
  /// cut is shared with anybody.
  std::int64_t mark(const RowBits* changed, int max_threads);
  /// The rows marked; before the cut is shared with anybody.
  const RowBits& marked() const noexcept { return *pending_; }
  /// What follows the fields of the layout of each row marked. Before the cut is shared.
  void set_meta(MetaCopy meta) noexcept { meta_ = std::move(meta); }

  /// Copies the pending rows among these before they change. Where copies have reached their limit,
  /// waits for the reader. Throws std::bad_alloc, which does no harm.
  void preserve_rows(std::span<const std::uint32_t> row_numbers, CopyWaits& waits);

  class UpdateCopies;
  /// Memory for copies of the pending rows among sorted items, which the update then copies piece
  /// by piece as it goes, while they are in the processor's cache. Does not wait: if bytes must
  /// find room first, nothing is planned, and wait_for_room is to be called without the locks of
  /// rows. Throws std::bad_alloc, which does no harm.
  UpdateCopies plan(const SortedGradients& gradients, int max_threads);
  void wait_for_room(std::int64_t num_bytes, CopyWaits& waits);

  /// Takes the next rows, at most `arrays.capacity` and about 256 KiB; returns how many. The caller
  /// holds rows_mutex. Throws Error(kBusy) once the cut is closed.
  std::int64_t read(const RowArrays& arrays);
  [[noreturn]] static void throw_closed();
  /// True once every row has been read.
  bool is_read() const noexcept { return position_.load() >= end_row_; }

  /// Readies a piece of the memory for the copies of two updates as large as the largest so far;
  /// before the first update, of a large one. False if there is no need. For the thread that reads.
  bool stock() noexcept;
  bool has_copied() const noexcept { return max_copied_bytes_.load() > 0; }

  /// Lets waiting updates go on; nothing is read or copied any more. Returns, once, the parts that
  /// it was made of, clean for another cut, with up to `keep_bytes` of memory for copies, within
  /// the limit; without that memory while another thread readies some of it.
  CutMemory::Parts close(std::int64_t keep_bytes) noexcept;

  /// Memory beside copies: bits, and chunks that are ready or partly used.
  std::int64_t spare_bytes() const;
  std::int64_t copied_bytes() const noexcept { return copied_bytes_.load(); }
  std::int64_t max_copied_bytes() const noexcept { return max_copied_bytes_.load(); }

 private:
  // Copies of rows of one region, made together.
  struct CopyBlock;
  static constexpr int kRowsAhead = 8;  // copied rows are fetched so many ahead
  // A row that the reader takes.
  struct Taken {
    std::uint32_t row;
    Key key;
    const std::byte* copy;  // null: from its record
  };

  bool is_pending(std::int64_t row) const noexcept { return row < end_row_ && pending_->test(row); }
  bool has_room(std::int64_t num_bytes) const noexcept;
  std::int64_t bytes_to_wait_for(std::int64_t num_rows) const noexcept;
  void wait(std::unique_lock<std::mutex>& lock, std::int64_t num_bytes, CopyWaits& waits);
  void copy_pending(std::span<const std::uint32_t> row_numbers);
  CopyBlock* make_block(std::int64_t region, std::int64_t most);
  void make_blocks(const GradItem* items, std::int64_t begin, std::int64_t end,
                   std::vector<CopyBlock*>& made);
  std::int64_t count_pending(const GradItem* items, std::int64_t begin,
                             std::int64_t end) const noexcept;
  void fetch(std::uint32_t row) const noexcept;
  void fill(CopyBlock& block, std::int64_t i, std::uint32_t row) noexcept;
  void publish(CopyBlock& block) noexcept;
  std::int64_t band_of(std::int64_t region) const noexcept { return region / band_regions_; }
  std::int64_t bytes_to_stock() const noexcept;
  void free_bands(std::int64_t begin_region, std::int64_t end_region) noexcept;
  std::int64_t take(std::int64_t begin, std::int64_t most);
  void take_region(std::int64_t begin, std::int64_t end, std::size_t most);
  void gather_copies(std::int64_t begin, std::int64_t end);
  void emit(const RowArrays& arrays) const;
  void emit_meta(const RowArrays& arrays) const;

  const RowNumbers& numbers_;
  const RowStore& rows_;
  const PackedRows packed_;
  const std::int64_t end_row_;
  const std::optional<std::int64_t> max_copy_bytes_;
  const int process_;
  const std::int64_t region_rows_;   // a power of two; copies are kept by region
  const std::int64_t chunk_rows_;    // rows of about 256 KiB
  const std::int64_t band_regions_;  // regions whose copies are freed together

  mutable std::mutex mutex_;
  std::condition_variable moved_;  // the reader went on, or the cut was closed
  bool is_closed_ = false;
  std::unique_ptr<RowBits> pending_;
  std::vector<CopyBlock*> regions_;  // lists of copies; changed atomically
  std::shared_ptr<CopyMemory> memory_;
  std::atomic<std::int64_t> position_{0};
  std::atomic<std::int64_t> copied_bytes_{0};
  std::atomic<std::int64_t> max_copied_bytes_{0};
  std::atomic<std::int64_t> most_at_once_;  // bytes that one update may copy, as far as seen

  MetaCopy meta_;
  std::size_t num_read_ = 0;  // rows

  // The reader's, kept for their memory.
  std::vector<Taken> copies_;
  std::vector<Taken> taken_;
};

}  // namespace recsdk::internal
