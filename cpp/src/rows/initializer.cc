#include "recsdk/initializer.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "util/hash.h"
#include "util/must.h"
#include "util/number_text.h"

namespace recsdk {
namespace {

using internal::must;
using internal::number_text;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("initializer: " + what);
}

void require_finite(const char* name, float value) {
  if (!std::isfinite(value)) refuse(must(name, "be finite", value));
}

void check_range(const InitializerConfig& config) {
  require_finite("low", config.low);
  require_finite("high", config.high);
  const std::string range = "low=" + number_text(config.low) + ", high=" + number_text(config.high);
  if (config.low > config.high) refuse(must("low", "be at most high", range));
  if (!std::isfinite(config.high - config.low))
    refuse(must("high - low", "be finite in single precision", range));
}

void check_normal(const InitializerConfig& config) {
  // No draw is farther from the mean: its radius is sqrt(-2 ln(2^-32)) = 6.66 at most.
  constexpr float kFarthest = 7.0F;
  require_finite("mean", config.mean);
  require_finite("stddev", config.stddev);
  if (config.stddev < 0.0F) refuse(must("stddev", "be 0 or more", config.stddev));
  if (!std::isfinite(std::fabs(config.mean) + kFarthest * config.stddev)) {
    refuse(must("|mean| + 7 * stddev", "be finite in single precision",
                "mean=" + number_text(config.mean) + ", stddev=" + number_text(config.stddev)));
  }
}

}  // namespace

InitializerConfig InitializerConfig::constant(float value) {
  InitializerConfig config;
  config.kind = InitializerKind::kConstant;
  config.value = value;
  return config;
}

InitializerConfig InitializerConfig::uniform(float low, float high) {
  InitializerConfig config;
  config.kind = InitializerKind::kUniform;
  config.low = low;
  config.high = high;
  return config;
}

InitializerConfig InitializerConfig::normal(float mean, float stddev) {
  InitializerConfig config;
  config.kind = InitializerKind::kNormal;
  config.mean = mean;
  config.stddev = stddev;
  return config;
}

InitializerConfig InitializerConfig::truncated_normal(float mean, float stddev, float low,
                                                      float high) {
  InitializerConfig config = normal(mean, stddev);
  config.kind = InitializerKind::kTruncatedNormal;
  config.low = low;
  config.high = high;
  return config;
}

InitializerConfig InitializerConfig::custom(RowCallback callback) {
  InitializerConfig config;
  config.kind = InitializerKind::kCustom;
  config.callback = std::move(callback);
  return config;
}

void InitializerConfig::validate() const {
  switch (kind) {
    case InitializerKind::kConstant:
      return require_finite("value", value);
    case InitializerKind::kUniform:
      return check_range(*this);
    case InitializerKind::kNormal:
      return check_normal(*this);
    case InitializerKind::kTruncatedNormal:
      check_range(*this);
      check_normal(*this);
      if (stddev == 0.0F)
        refuse(must("stddev of a truncated normal", "be above 0", stddev) + "; or use a constant");
      return;
    case InitializerKind::kCustom:
      if (!callback) refuse("a custom initializer must have a callback, got none");
      return;
  }
  refuse(must("kind", "be one of InitializerKind", kind));
}

std::uint64_t table_hash(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char c : name) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001B3U;
  }
  return internal::mix64(hash);
}

}  // namespace recsdk
