// A row file as a sequence of checked blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "checkpoint/format.h"
#include "io/block_memory.h"
#include "io/checksum.h"
#include "recsdk/row_file.h"

namespace recsdk::internal {

/// Throws Error(kCheckpoint) for what is damaged; after that it can only be destroyed.
class RowFileParser {
 public:
  /// Reads the header.
  RowFileParser(std::shared_ptr<ByteSource> source, std::int64_t size, std::string name,
                const ReadOptions& options);

  const std::string& name() const { return name_; }
  std::int64_t size() const { return size_; }
  const RowFileHeader& header() const { return header_; }
  const RowFileSummary& summary() const { return summary_; }

  /// False at the end, after checking the end.
  bool next(RowBlock& block);

 private:
  using Memory = std::shared_ptr<const std::byte[]>;

  Place at(std::int64_t offset) const { return {name_, offset}; }
  void begin_part(std::size_t size);
  void read_some(std::span<std::byte> bytes);
  void read_exactly(std::span<std::byte> bytes);
  void add_checksums(std::span<const std::byte> bytes);
  Memory take_or_read(std::size_t size);
  void read_header();
  BlockHead read_head();
  void check_totals(const BlockHead& head, std::int64_t place) const;
  Memory read_payload(const BlockHead& head, std::int64_t place);
  Memory unpack(const BlockHead& head, std::span<const std::byte> stored, std::int64_t place);
  RowBlock make_block(const BlockHead& head, Memory memory);
  void check_end(const std::byte* payload, std::int64_t place);

  std::shared_ptr<ByteSource> source_;
  std::int64_t size_;
  std::string name_;
  ReadOptions options_;
  RowFileHeader header_;
  std::uint64_t file_checksum_ = 0;
  std::int64_t offset_ = 0;
  std::uint64_t num_blocks_ = 0;
  std::pair<std::uint8_t, std::uint8_t> last_;  // type and cause of the block before
  BlockMemory memory_;
  StreamChecksum checksum_;          // of the file so far
  StreamChecksum64 block_checksum_;  // of the payload so far
  RowFileSummary summary_;
};

}  // namespace recsdk::internal
