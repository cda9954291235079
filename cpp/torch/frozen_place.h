// Where exported programs say that a table lies, and the files of it.
#pragma once

#include <cstdint>
#include <map>
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
  std::string group;  ///< equal for tables of one freeze that one process exported
};

/// What lies at a place.
struct Frozen {
  std::string token;                                      ///< of the freeze
  std::map<std::string, std::vector<std::string>> files;  ///< of each table, by its name
};

/// Parses the argument `place` of an operator. Throws std::runtime_error for anything else.
Place parse_place(std::string_view text);

/// All tables of the manifest at a place. Throws std::runtime_error, naming the path, for what is
/// missing, no manifest, names a table twice, or lacks a shard. What the files hold is checked as
/// they are opened.
Frozen read_frozen(const Place& place);

/// The same of a manifest's text.
Frozen parse_frozen(std::string_view text, const Place& place);

}  // namespace recsdk::serving_torch
