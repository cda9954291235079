// The bytes of a frozen file: header, index, records. docs/design/0007-serving.md says why.
//
// A record is [key | row]. Records lie in ascending order of `hash(key)`, so those of one line of
// the index are side by side, and a line needs one position and two bytes a key.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "recsdk/serving/frozen.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::internal {

static_assert(std::endian::native == std::endian::little, "frozen files are little-endian");

inline constexpr char kFrozenMagic[8] = {'R', 'E', 'C', 'S', 'D', 'K', 'F', 'Z'};
inline constexpr std::uint32_t kFrozenByteOrder = 0x01020304;
inline constexpr std::int64_t kFrozenHeaderBytes = 8192;
inline constexpr std::int64_t kMaxFrozenName = 4096;  // bytes
inline constexpr std::int64_t kMaxFrozenDim = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxFrozenShards = 65'536;
/// So that no product of the sizes of a file overflows.
inline constexpr std::int64_t kMaxFrozenRows = std::int64_t{1} << 38;
inline constexpr std::int64_t kKeyBytes = 8;

/// The start of a file, as it lies there. The checksum is of all bytes of the header before it.
struct FrozenHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t dtype;
  float default_value;
  std::int64_t dim;
  std::int64_t row_bytes;
  std::int64_t num_rows;
  std::int64_t num_lines;
  std::uint64_t hash_seed;
  std::uint32_t shard;
  std::uint32_t num_shards;
  std::uint8_t token[16];  // equal in all files of one frozen checkpoint
  std::int64_t file_bytes;
  std::uint64_t index_checksum;
  std::uint64_t records_checksum;
  std::uint32_t table;  // its number in the manifest
  std::uint32_t name_bytes;
  char name[kMaxFrozenName];
  std::int64_t num_shared;  // of the table; a file has those that keys of its shard read
  std::uint64_t shared_checksum;
  std::uint8_t zeros[kFrozenHeaderBytes - kMaxFrozenName - 144];
  std::uint64_t checksum;
};
static_assert(sizeof(FrozenHeader) == kFrozenHeaderBytes);
static_assert(offsetof(FrozenHeader, name) == 120);

/// A line of the index: the records [begin, begin + count) have keys of this line, and the first
/// kTags of them a tag here.
struct alignas(64) FrozenLine {
  static constexpr int kTags = 28;
  static constexpr int kMostRecords = 255;

  std::uint64_t begin_and_count;  // count in the upper 8 bits
  std::uint16_t tags[kTags];      // those beyond count are 0, and mean nothing

  std::int64_t begin() const {
    return static_cast<std::int64_t>(begin_and_count & 0xFF'FFFF'FFFF'FFFFU);
  }
  int count() const { return static_cast<int>(begin_and_count >> 56); }
};
static_assert(sizeof(FrozenLine) == 64);

/// Records a line has on average: 3.2 bytes of index a key, and 1 in 220 keys without a tag.
inline constexpr std::int64_t kRecordsPerLine = 20;

inline std::int64_t frozen_lines(std::int64_t num_rows) {
  return (num_rows + kRecordsPerLine - 1) / kRecordsPerLine + (num_rows == 0 ? 1 : 0);
}

/// A bijection of the 64-bit numbers for each seed.
inline std::uint64_t frozen_hash(Key key, std::uint64_t seed) {
  return mix64((static_cast<std::uint64_t>(key) ^ seed) + 0x9E3779B97F4A7C15U);
}

/// Lines in ascending order of hash.
inline std::int64_t frozen_line(std::uint64_t hash, std::int64_t num_lines) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(
      static_cast<Wide>(hash) * static_cast<std::uint64_t>(num_lines) >> 64);
}

inline std::uint16_t frozen_tag(std::uint64_t hash) {
  return static_cast<std::uint16_t>(hash >> 8);
}

inline std::int64_t frozen_row_bytes(FrozenDType dtype, std::int64_t dim) {
  switch (dtype) {
    case FrozenDType::kFloat32:
      return 4 * dim;
    case FrozenDType::kBFloat16:
    case FrozenDType::kFloat16:
      return 2 * dim;
    case FrozenDType::kInt8:
      return dim + 8;
    case FrozenDType::kInt4:
      return (dim + 1) / 2 + 4;
  }
  return 0;
}

inline const char* frozen_dtype_name(FrozenDType dtype) {
  constexpr const char* kNames[kNumFrozenDTypes] = {"float32", "bfloat16", "float16", "int8",
                                                    "int4"};
  return kNames[static_cast<std::size_t>(dtype)];
}

/// What is said of a row that quantize_row refuses.
inline std::string frozen_row_refusal(const std::string& table, FrozenDType dtype, Key key) {
  return "table '" + table + "': " + frozen_dtype_name(dtype) + " cannot hold the row of key " +
         std::to_string(key) +
         ", which is not finite or too large; freeze it as float32, or see why it is so";
}

inline std::uint32_t frozen_shard(Key key, std::uint32_t num_shards) {
  const std::uint64_t shard = virtual_shard_hash(static_cast<std::uint64_t>(key)) & 0xFFFFU;
  return static_cast<std::uint32_t>(shard * num_shards >> 16);
}

/// Rows that keys without one share, at most: one of each virtual shard.
inline constexpr std::int64_t kMaxFrozenShared = 65'536;

/// Which of so many shared rows a key reads.
inline std::int64_t frozen_shared_row(Key key, std::int64_t num_shared) {
  const std::uint64_t shard = virtual_shard_hash(static_cast<std::uint64_t>(key)) & 0xFFFFU;
  return static_cast<std::int64_t>(shard * static_cast<std::uint64_t>(num_shared) >> 16);
}

/// The shared rows [begin, end) that keys of a shard read: those that its file has.
struct SharedRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
};

inline SharedRange frozen_shared_range(std::int64_t shard, std::int64_t num_shards,
                                       std::int64_t num_shared) {
  if (num_shared == 0) return {};
  constexpr std::int64_t kVirtual = 65'536;
  const std::int64_t first = (shard * kVirtual + num_shards - 1) / num_shards;
  const std::int64_t last = ((shard + 1) * kVirtual + num_shards - 1) / num_shards - 1;
  return {first * num_shared / kVirtual, last * num_shared / kVirtual + 1};
}

inline std::int64_t frozen_records_offset(std::int64_t num_lines) {
  return kFrozenHeaderBytes + num_lines * static_cast<std::int64_t>(sizeof(FrozenLine));
}

}  // namespace recsdk::internal
