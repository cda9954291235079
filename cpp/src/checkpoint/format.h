// The bytes of row files: fixed structures, their encoding and the checks of what was read.
// docs/reference/checkpoint.md says the same in words.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "recsdk/row_file.h"

namespace recsdk::internal {

static_assert(std::endian::native == std::endian::little, "row files are little-endian");

inline constexpr std::int64_t kMaxFields = 32;
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 20;  // elements of a field
inline constexpr std::size_t kNameBytes = 48;

struct FileHead {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t header_bytes;  // head, fields and checksum
  std::uint32_t kind;
  std::uint32_t num_fields;
  std::uint64_t dim;
  std::array<std::uint8_t, 16> token;
};
static_assert(sizeof(FileHead) == 48);

struct FieldEntry {
  std::array<char, kNameBytes> name;  // filled up with zeros, at least one
  std::uint32_t type;
  std::uint32_t reserved;
  std::uint64_t count;
};
static_assert(sizeof(FieldEntry) == 64);

inline constexpr std::uint8_t kEndBlock = 255;

struct BlockHead {
  std::array<char, 4> magic;
  std::uint8_t type;  // a BlockKind, or kEndBlock
  std::uint8_t codec;
  std::uint8_t cause;  // of erased keys: a LeaveCause; else 0
  std::uint8_t reserved;
  std::uint64_t index;  // number of blocks before this one
  std::uint64_t num_rows;
  std::uint64_t raw_bytes;
  std::uint64_t stored_bytes;
  std::uint64_t payload_checksum;  // of the stored bytes
  std::uint64_t file_checksum;     // that of the file's header: binds a block to its file
  std::uint64_t checksum;          // of the 56 bytes before
};
static_assert(sizeof(BlockHead) == 64);

struct EndPayload {
  std::uint64_t num_rows;
  std::uint64_t num_erased;
  std::uint64_t num_blocks;  // without the end
};

/// Counts keys that left by what is not erasing.
inline void count_causes(RowFileSummary& summary, LeaveCause cause, std::int64_t count) {
  if (cause == LeaveCause::kEvicted) summary.num_evicted += count;
  if (cause == LeaveCause::kExpired) summary.num_expired += count;
}

/// Arrays in a block begin at multiples of 8 bytes.
constexpr std::int64_t padded(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }
/// Bytes of a block of `n` rows.
std::int64_t rows_payload_bytes(const RowFileHeader& header, std::int64_t n);

std::vector<std::byte> encode(const RowFileHeader& header);
/// Fills magic and checksum of a block header.
void seal(BlockHead& head);

/// The file and the offset where something is wrong.
struct Place {
  const std::string& file;
  std::int64_t offset;
};

/// Throws Error(kCheckpoint): file, offset, reason, what to do.
[[noreturn]] void throw_damaged(const Place& place, const std::string& reason);

/// Checks the first 48 bytes of a file, as far as reading the rest needs it.
void check(const FileHead& head, std::int64_t file_size, const std::string& file);
/// Decodes a whole header, `head.header_bytes` long.
RowFileHeader decode(std::span<const std::byte> bytes, const std::string& file);
/// Checks a block header alone; `left` bytes of the file come after it.
void check(const BlockHead& head, const RowFileHeader& header, std::int64_t left,
           const Place& place);

}  // namespace recsdk::internal
