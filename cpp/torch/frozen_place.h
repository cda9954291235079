// Where exported programs say that a table lies, and the files of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace recsdk::serving_torch {

/// What an exported program says of a table.
struct Place {
  std::string path;                                 ///< of the frozen checkpoint
  std::string name;                                 ///< of the table
  std::optional<std::vector<std::int64_t>> shards;  ///< those that were open; none: all
};

/// Parses the argument `place` of an operator. Throws std::runtime_error for anything else.
Place parse_place(std::string_view text);

/// The files of a table, by the manifest at its place. Throws std::runtime_error, naming the path,
/// for what is missing, no manifest, or has no such table or shard. What the files hold is checked
/// as they are opened.
std::vector<std::string> files_of(const Place& place);

}  // namespace recsdk::serving_torch
