// Reads bytes as a row file and restores a table from it. The same body is a unit test, over
// mutations of the corpus, and a fuzz target.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "checkpoint/format.h"
#include "io/checksum.h"
#include "recsdk/recsdk.h"
#include "row_files_in_memory.h"

namespace recsdk::test {

/// Gives all checksums of a damaged file their right values, so far as its blocks can be followed:
/// what is behind them gets its share of the damage.
inline void mend_checksums(Bytes& bytes) {
  internal::FileHead head;
  if (bytes.size() < sizeof(head)) return;
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.header_bytes < sizeof(head) + 8 || head.header_bytes > bytes.size()) return;
  const std::uint64_t of_file =
      internal::checksum64(std::span(bytes).first(head.header_bytes - 8U));
  std::memcpy(bytes.data() + head.header_bytes - 8, &of_file, 8);
  for (std::size_t at = head.header_bytes; bytes.size() - at >= sizeof(internal::BlockHead);) {
    internal::BlockHead block;
    std::memcpy(&block, bytes.data() + at, sizeof(block));
    const std::size_t left = bytes.size() - at - sizeof(block);
    const std::size_t stored = std::min<std::size_t>(block.stored_bytes, left);
    block.payload_checksum =
        internal::checksum64(std::span(bytes).subspan(at + sizeof(block), stored));
    block.file_checksum = of_file;
    internal::seal(block);
    std::memcpy(bytes.data() + at, &block, sizeof(block));
    at += sizeof(block) + stored;
  }
}

/// A file that can be read: what comes out is whole.
inline void check_block(const RowBlock& block, const RowFileHeader& header) {
  volatile std::uint8_t last = 0;
  const auto touch = [&](const void* data, std::size_t size) {
    if (size > 0) last = static_cast<const std::uint8_t*>(data)[size - 1];
  };
  touch(block.keys.data(), block.keys.size_bytes());
  for (std::size_t f = 0; f < block.fields.size(); ++f)
    touch(block.fields[f],
          block.keys.size() * static_cast<std::size_t>(header.fields[f].row_bytes()));
}

inline void read_and_restore(const Bytes& bytes) {
  RowFileReader reader = open(bytes, false, 100);
  RowBlock block;
  while (reader.next(block)) check_block(block, reader.header());
  if (reader.header().dim > 64) return;
  TableConfig config;
  config.dim = reader.header().dim;
  config.hash_seed = 1;
  config.num_threads = 1;
  Table table(config);
  Restore restore(table);
  RowFileReader again = open(bytes);
  restore.add_file(again, {.owned = {}, .modulo = {}, .drop_state = true});
  restore.commit(0);
  table.check_invariants();
}

/// True if the file was read; an Error(kCheckpoint) is the only other legal end.
inline bool run_row_file(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return false;
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  Bytes bytes(first + 1, first + size);
  if ((data[0] & 1U) != 0) mend_checksums(bytes);
  try {
    read_and_restore(bytes);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCheckpoint) throw;
    return false;
  }
}

}  // namespace recsdk::test
