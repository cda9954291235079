// The layout of a row, as data: a record [weights | optimizer state of every column], and beside it
// scalars: state of one or two numbers a row.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/optimizer.h"

namespace recsdk {

enum class DType : std::uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,  ///< the upper half of a float32
  kFloat16 = 2,   ///< IEEE 754's binary16
};

/// The most columns of a row: with Adam's state 12 MiB; longer rows would not fit the slabs.
inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;

/// Bytes of one element.
constexpr std::int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Where a field of a row lies. Scalars are kept apart, so that they cost no cache line of their
/// own and records keep their alignment.
enum class FieldPlace : std::uint8_t {
  kRecord = 0,   ///< in the row's record, 16-byte aligned
  kScalars = 1,  ///< among the row's scalars
};

/// One field of a row.
struct RowField {
  std::string name;     ///< "weight", or that of the optimizer's state: "sum", "exp_avg", ...
  DType dtype;          ///< of its elements
  FieldPlace place;     ///< what `offset` counts from
  std::int64_t offset;  ///< bytes from the start of the record or of the row's scalars
  std::int64_t count;   ///< elements that mean something: D, or 1 or 2 among scalars
  float initial_value;  ///< of a new row (not used for "weight")
};

/// A table's rows: field 0 is "weight" at offset 0 of the record; the others are the optimizer's
/// state.
struct RECSDK_API RowLayout {
  std::int64_t dim;            ///< D
  std::int64_t stride;         ///< bytes of a record, a multiple of 16
  std::int64_t scalar_stride;  ///< bytes of a row's scalars, a multiple of 4; often 0
  std::vector<RowField> fields;

  /// Bytes that a row takes in all.
  std::int64_t row_bytes() const { return stride + scalar_stride; }

  /// Sum of `count` over the state fields: the width of one row of exported state.
  std::int64_t state_width() const;

  /// State is always float32. Throws std::invalid_argument for a `dim` outside 1 to 2^20, a bad
  /// optimizer or type.
  static RowLayout make(std::int64_t dim, const OptimizerConfig& optimizer,
                        DType weight_dtype = DType::kFloat32);
};

}  // namespace recsdk
