// From strings to keys: XXH64 of arrays of strings, as Arrow lays them out.
#pragma once

#include <cstdint>
#include <span>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// Writes XXH64 of each string, read as a signed number: of string n, which is
/// bytes[offsets[n], offsets[n + 1]), to keys[n]. The same on every machine.
/// Source: Y. Collet, "XXH64 algorithm description", https://github.com/Cyan4973/xxHash.
///
/// `offsets` are one more than `keys`, never fall, and lie within `bytes`; what is before the first
/// or after the last is not looked at. Throws std::invalid_argument for others, with nothing
/// written. Spread over the thread pool; the result does not depend on threads. Some 5 ns a short
/// string.
RECSDK_API void hash_strings(std::span<const std::uint8_t> bytes,
                             std::span<const std::int64_t> offsets, std::uint64_t seed,
                             std::span<Key> keys);

}  // namespace recsdk
