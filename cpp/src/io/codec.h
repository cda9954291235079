// Compression of blocks.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "recsdk/row_file.h"

namespace recsdk::internal {

/// Compresses `raw` into `out`; returns the bytes used, or nothing if they would not fit.
/// Throws std::invalid_argument where this build lacks the codec, std::bad_alloc.
std::optional<std::size_t> compress(Codec codec, std::span<const std::byte> raw,
                                    std::span<std::byte> out);

/// True if `stored` decompresses to exactly the size of `out`. Throws as compress does.
bool decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out);

/// Throws std::invalid_argument, saying what to build with, if this build lacks the codec.
void require_codec(Codec codec);

}  // namespace recsdk::internal
