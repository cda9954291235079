// The instruction set that the process uses, as an index.
#pragma once

namespace recsdk::internal {

/// The instruction sets that the engine knows, slowest first; the numbers index tables of
/// functions.
enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

inline constexpr int kNumIsas = 3;

/// The one in use. Cheap. The first call chooses and throws what recsdk::isa() throws.
Isa current_isa();

}  // namespace recsdk::internal
