// What a frozen table is, shared by what writes it (recsdk/freeze.h) and what serves it
// (recsdk/serving/serving_table.h). docs/reference/frozen.md has every byte of a frozen file.
#pragma once

#include <cstdint>
#include <string>

#include "recsdk/export.h"

namespace recsdk {

/// The version of frozen files that is written; readers refuse any other.
inline constexpr std::uint32_t kFrozenVersion = 1;

/// How the rows of a frozen table are stored. The numbers are part of the format.
enum class FrozenDType : std::uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,  ///< the upper half of a float32
  kFloat16 = 2,   ///< IEEE 754's binary16
  kInt8 = 3,      ///< a byte a column, then the row's scale and bias as float32
  kInt4 = 4,      ///< two columns a byte, then the row's scale and bias as float16
};

/// Number of values of FrozenDType.
inline constexpr int kNumFrozenDTypes = 5;

/// What all files of one frozen table say.
struct FrozenInfo {
  std::string name;      ///< of the table
  std::int64_t dim = 0;  ///< D, row width
  FrozenDType dtype = FrozenDType::kFloat32;
  float default_value = 0.0F;   ///< what every column of a missing key reads
  std::int64_t num_shared = 0;  ///< rows that missing keys share, and read in its place; or 0
  std::int64_t num_rows = 0;    ///< of the files that are open
  std::int64_t row_bytes = 0;   ///< of a stored row, without its key
  std::int64_t num_bytes = 0;   ///< of the files that are open
  std::int64_t num_shards = 1;  ///< W: files that the table is cut into
};

}  // namespace recsdk
