// Writing frozen tables, which recsdk/serving/serving_table.h serves.
//
// Shape letters: N rows of a call, D row width, W shards.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "recsdk/export.h"
#include "recsdk/serving/frozen.h"
#include "recsdk/types.h"

namespace recsdk {

/// What a frozen table is made of. Only `name` and `dim` have no default.
struct FreezeConfig {
  std::string name;      ///< of the table: 1 to 4096 bytes
  std::int64_t dim = 0;  ///< D, 1 to 2^20
  FrozenDType dtype = FrozenDType::kFloat32;
  float default_value = 0.0F;            ///< what every column of a missing key reads; finite
  std::int64_t num_shards = 1;           ///< W, 1 to 65536
  std::int64_t num_shared = 0;           ///< rows that missing keys share; 0: they read the value
  std::int64_t expected_rows = 0;        ///< about how many; more only take more memory
  std::array<std::uint8_t, 16> token{};  ///< equal in all files of one frozen checkpoint
  std::uint32_t table = 0;               ///< the table's number among those
  std::uint64_t hash_seed = 0;           ///< one that nobody knows who chooses keys
  std::string scratch_folder;            ///< for a file without a name, as large as the rows
};

/// One file of a frozen table.
struct FrozenFileSummary {
  std::int64_t num_rows = 0;
  std::int64_t num_bytes = 0;
  std::uint64_t checksum = 0;  ///< of the header, which has those of the other parts: XXH3-64
};

/// Makes the files of one frozen table of rows in any order: all rows, then each shard's file.
///
/// Memory: 128 MiB, and 8 bytes for some thousand bytes of rows; disk: the rows once more, in the
/// scratch folder, until it is destroyed. Not thread-safe. After it threw, a writer can only be
/// destroyed.
class RECSDK_API FrozenWriter {
 public:
  /// Throws std::invalid_argument for a bad config, Error(kCheckpoint) if the scratch folder cannot
  /// be written.
  explicit FrozenWriter(const FreezeConfig& config);
  ~FrozenWriter();
  FrozenWriter(FrozenWriter&&) noexcept;
  FrozenWriter& operator=(FrozenWriter&&) noexcept;

  /// Adds weights (N, D) of keys (N,), each key once over all calls. 16-bit rows are rounded to the
  /// nearest, kInt8 and kInt4 as by quantize_row. Throws std::invalid_argument for a row that the
  /// dtype cannot hold, which names its key, Error(kCheckpoint) for a full disk.
  void add(std::span<const Key> keys, const float* weights);
  /// Adds weights (m, D) of shared rows, each under a key (m,) that reads it, as
  /// recsdk::shared_row_key; all config.num_shared of them are due before the first file. Throws
  /// as `add`.
  void add_shared(std::span<const Key> keys, const float* weights);
  /// Rows added so far, shared ones left out.
  std::int64_t num_rows() const;

  /// Writes the file of a shard to an empty file that can be written at any place; nothing can be
  /// added from then on. `name` is for messages. It does not fsync; the caller does. Throws
  /// Error(kCheckpoint) for a key that was added twice, and for a full disk.
  FrozenFileSummary write_shard(std::int64_t shard, int descriptor, const std::string& name);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Bytes of a stored row of width `dim`, without its key.
RECSDK_API std::int64_t frozen_row_bytes(FrozenDType dtype, std::int64_t dim);

/// Stores a row (D,) in `out`, frozen_row_bytes of it. kInt8 and kInt4 keep the smallest value as
/// bias, and as scale the range over 255 or 15; each value becomes the nearest step, ties to even.
/// Both are stored behind the values, as float32 or as float16. Bits are those of FBGEMM's
/// FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf, but for the sign of
/// a bias of zero in a row that has zeros of both signs. False, with `out` unspecified, if the
/// dtype cannot hold the row: kInt8 and kInt4 need finite values whose range is finite, kInt4 no
/// smallest value and scale beyond float16; a finite value must not become infinite, as those of
/// 65520 and more do as kFloat16. Source: https://github.com/pytorch/FBGEMM (formulas of
/// QuantUtils).
RECSDK_API bool quantize_row(FrozenDType dtype, std::span<const float> row, std::byte* out);

}  // namespace recsdk
