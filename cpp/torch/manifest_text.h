// Reading a manifest of frozen tables as text.
#pragma once

#include <cstdint>
#include <string>

namespace recsdk::serving_torch {

/// More bytes are no manifest, and are not read.
inline constexpr std::uintmax_t kMostManifestBytes = std::uintmax_t{256} << 20;

/// The content of a plain file. Throws std::runtime_error, naming the path, for what is missing,
/// too large or no plain file: a pipe in its place is not waited for, whenever it came there.
std::string manifest_text(const std::string& path);

}  // namespace recsdk::serving_torch
