// What an index may be made of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "recsdk/index.h"

namespace recsdk::internal {

/// The config, if it is a good one. Throws std::invalid_argument naming the field that is wrong;
/// `title` begins the message.
IndexConfig validated(IndexConfig config, const std::string& title);

/// Into how many groups max_rows is divided; absent: there is no limit.
std::optional<std::int64_t> groups_of(const IndexConfig& config);
/// The same of admission's max_records; absent: they follow from it.
std::optional<std::int64_t> record_groups_of(const IndexConfig& config);

}  // namespace recsdk::internal
