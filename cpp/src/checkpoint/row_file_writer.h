// The inside of a RowFileWriter, for code that fills its blocks in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format.h"
#include "io/block_queue.h"
#include "recsdk/row_file.h"
#include "util/owned_here.h"

namespace recsdk {

/// Room for rows in the current block: an array for each field, as it will be stored.
struct RowSlots {
  std::int64_t capacity = 0;  ///< rows that fit, at least 1
  Key* keys = nullptr;
  std::vector<std::byte*> fields;
};

struct RowFileWriter::Impl {
  Impl(ByteSink& sink, const RowFileHeader& file_header, const RowFileOptions& file_options);

  /// The free rest of the current block; rows put there count once commit_rows is called.
  RowSlots row_slots();
  void commit_rows(std::int64_t count);

  /// `pause` is called on this thread now and then, between pieces of its work.
  void set_pause(std::function<void()> pause) { queue_->set_pause(std::move(pause)); }

  void write_erased(std::span<const Key> keys, LeaveCause cause);
  RowFileSummary finish();

  const RowFileHeader header;
  const RowFileOptions options;
  std::int64_t num_bytes = 0;

 private:
  void require_stage(int stage, const char* call);
  void begin_block();
  void flush_rows();
  void pack_rows();
  void add_rows_to_content();
  void flush(std::uint8_t type, std::int64_t num_rows, std::int64_t raw_bytes);
  void submit(internal::BlockHead head, std::int64_t raw_bytes);
  std::byte* payload() { return block_->data() + sizeof(internal::BlockHead); }
  std::byte* field_array(std::byte* first, std::int64_t n, std::size_t field) const;

  const std::int64_t rows_per_block_;
  internal::OwnedHere<internal::BlockQueue> queue_;
  std::uint64_t file_checksum_ = 0;
  std::unique_ptr<internal::BlockBuffer> block_;  // being filled, or null
  std::int64_t num_in_block_ = 0;
  int stage_ = 0;  // the highest kind of block so far; those of lower kinds are over
  LeaveCause cause_ = LeaveCause::kEvicted;  // the highest so far
  std::uint64_t num_blocks_ = 0;
  RowFileSummary summary_;
};

struct RowFileAccess {
  static RowFileWriter::Impl& impl(RowFileWriter& writer) { return *writer.impl_; }
};

}  // namespace recsdk
