// How a new row gets its first values: always a pure function of (seed, table, key, column).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

enum class InitializerKind : std::uint8_t {
  kConstant = 0,         ///< every column is `value`
  kUniform = 1,          ///< uniform over [low, high)
  kNormal = 2,           ///< normal with `mean` and `stddev`
  kTruncatedNormal = 3,  ///< normal, drawn again until within [low, high]
  kCustom = 4,           ///< a callback makes the rows
};

/// Fills rows for `keys` (N,): writes N * dim floats to `values` (N, D), row after row.
/// It must be a pure function of each key. It may throw: the inserting call then changes nothing.
/// It runs under the table's lock and must not call the table (Error(kBusy)). Callbacks of several
/// tables may run side by side.
using RowCallback = std::function<void(std::span<const Key> keys, float* values)>;

/// Describes an initializer; the defaults make a row of zeros.
///
/// Values come from Philox4x32-10, a counter-based generator, so they depend on nothing but
/// (seed, table name, key, column). Logarithm, sine and cosine are the engine's own, so that they
/// are bit-equal on every instruction set.
/// Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox);
/// G. Box and M. Muller, "A Note on the Generation of Random Normal Deviates", 1958.
struct RECSDK_API InitializerConfig {
  InitializerKind kind = InitializerKind::kConstant;
  float value = 0.0F;    ///< kConstant
  float low = 0.0F;      ///< kUniform, kTruncatedNormal
  float high = 0.0F;     ///< kUniform, kTruncatedNormal
  float mean = 0.0F;     ///< kNormal, kTruncatedNormal
  float stddev = 1.0F;   ///< kNormal, kTruncatedNormal
  RowCallback callback;  ///< kCustom

  static InitializerConfig constant(float value);
  static InitializerConfig uniform(float low, float high);
  static InitializerConfig normal(float mean, float stddev);
  /// `low` and `high` are in the units of the values, not in standard deviations.
  static InitializerConfig truncated_normal(float mean, float stddev, float low, float high);
  static InitializerConfig custom(RowCallback callback);

  /// Throws std::invalid_argument if a field is out of range or not finite.
  void validate() const;
};

/// The 64-bit identity of a table in its initial values: FNV-1a of the name's UTF-8 bytes, then one
/// round of the finalizer of SplitMix64. Source: G. Fowler, L. Noll, K.-P. Vo (FNV-1a);
/// G. Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
RECSDK_API std::uint64_t table_hash(std::string_view name);

/// Writes the initial rows of keys (N,) to `values` (N, D), in float32: those that a table of this
/// initializer, seed, hash of its name and D gives to new keys, before it rounds them to its type.
/// For rows that are not in a table. `max_threads` >= 1; absent: the pool's size. Throws
/// std::invalid_argument for a bad initializer or D, and what a custom one throws. Thread-safe.
RECSDK_API void initial_weights(const InitializerConfig& initializer, std::uint64_t seed,
                                std::uint64_t table_hash, std::int64_t dim,
                                std::span<const Key> keys, float* values,
                                std::optional<int> max_threads = std::nullopt);

}  // namespace recsdk
