#include "backends/backend.h"

#include <array>
#include <stdexcept>

#include "backends/cpu/cpu_device.h"
#include "backends/npu/npu_device.h"

namespace recsdk::internal {
namespace {

struct Backend {
  const char* name;
  std::shared_ptr<Device> (*open)(int ordinal);
};

constexpr std::array kBackends = {Backend{"cpu", open_cpu}, Backend{"npu", open_npu}};
constexpr std::array kNames = {kBackends[0].name, kBackends[1].name};

}  // namespace

bool is_device_optimizer(const OptimizerConfig& config) {
  const bool is_known =
      config.kind == OptimizerKind::kSgd || config.kind == OptimizerKind::kAdagrad ||
      config.kind == OptimizerKind::kRowwiseAdagrad || config.kind == OptimizerKind::kAdam;
  return is_known && config.bias_correction == BiasCorrection::kTable && config.dampening == 0.0 &&
         !config.catch_up && !config.clip_value && !config.clip_norm;
}

std::span<const char* const> backend_names() { return kNames; }

std::shared_ptr<Device> open_device(const std::string& backend, int ordinal) {
  for (const Backend& known : kBackends) {
    if (backend == known.name) return known.open(ordinal);
  }
  throw std::invalid_argument("backend must be 'cpu' or 'npu', got '" + backend + "'");
}

}  // namespace recsdk::internal
