// From an optimizer's configuration to the numbers that one update needs.
#pragma once

#include <cstdint>

#include "embedding/kernels.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

/// The numbers of update number t (1 for a table's first update) of rows laid out as `layout`,
/// which must be the layout made for `config`.
OptimizerStep make_optimizer_step(const OptimizerConfig& config, const RowLayout& layout,
                                  NonFinite on_nonfinite, std::uint64_t t);

}  // namespace recsdk::internal
