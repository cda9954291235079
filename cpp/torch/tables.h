// The tables that operators read, by the place that an exported program names.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "recsdk/serving/c_api.h"

namespace recsdk::serving_torch {

using Table = std::shared_ptr<const recsdk_serving_table>;

/// The table of a place, of width `dim`: one that the program gave, else the one that is at its
/// path, opened once. It stays open while a call has it. Throws std::runtime_error for what cannot
/// be opened or has another width.
Table table_of(const std::string& place, std::int64_t dim);

/// Throws std::runtime_error with the message of a call of recsdk/serving/c_api.h that failed.
void check(int status);

}  // namespace recsdk::serving_torch
