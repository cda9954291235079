// The layout of a row's record, as data: [weights | optimizer state], every field 16-byte aligned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/optimizer.h"

namespace recsdk {

enum class DType : std::uint8_t { kFloat32 = 0 };

/// One field of a row's record.
struct RowField {
  std::string name;     ///< "weight", "sum", "exp_avg", "exp_avg_sq", "step"
  DType dtype;          ///< of its elements
  std::int64_t offset;  ///< bytes from the record's start
  std::int64_t count;   ///< elements that mean something: D, or 1 for one number a row
  float initial_value;  ///< of a new row (not used for "weight")
};

/// A table's record: field 0 is "weight" at offset 0; the others are the optimizer's state.
struct RECSDK_API RowLayout {
  std::int64_t dim;     ///< D
  std::int64_t stride;  ///< bytes from one record to the next, a multiple of 16
  std::vector<RowField> fields;

  /// Sum of `count` over the state fields: the width of one row of exported state.
  std::int64_t state_width() const;

  static RowLayout make(std::int64_t dim, const OptimizerConfig& optimizer);
};

}  // namespace recsdk
