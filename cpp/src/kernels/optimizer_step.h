// From an optimizer's configuration to the numbers that one update needs.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernels.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

/// A table's sum of log(1 - lr * weight_decay) over its updates, after one more under `config`.
/// Without catch_up it stays 0.
double next_log_decay(const OptimizerConfig& config, double log_decay);

/// The numbers of update number t (1 for a table's first update) of rows laid out as `layout`,
/// which must be the layout made for `config`; `log_decay` is the sum before the update.
OptimizerStep make_optimizer_step(const OptimizerConfig& config, const RowLayout& layout,
                                  NonFinite on_nonfinite, std::uint64_t t, double log_decay);

/// How update number t rounds 16-bit weights; `keys` has the key of each row.
RoundingStep make_rounding_step(Rounding rounding, std::uint64_t seed, std::uint64_t table_hash,
                                std::uint64_t t, const RowAddresses& keys);

/// Throws std::invalid_argument for a count of updates that a table cannot go on from; `title`
/// begins the message.
void check_update_count(std::uint64_t count, const std::string& title);

}  // namespace recsdk::internal
