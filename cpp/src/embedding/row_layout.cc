#include "recsdk/row_layout.h"

#include <stdexcept>
#include <string>

namespace recsdk {
namespace {

// Fields start and end at 16 bytes, so that kernels may use whole 16-byte steps.
constexpr std::int64_t kFieldAlignment = 16;

// A record of 12 MiB with Adam's state; longer rows would not fit the slabs.
constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;

void add_field(RowLayout& layout, const char* name, std::int64_t count, float initial_value) {
  layout.fields.push_back({name, DType::kFloat32, layout.stride, count, initial_value});
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(float));
  layout.stride += (bytes + kFieldAlignment - 1) / kFieldAlignment * kFieldAlignment;
}

}  // namespace

std::int64_t RowLayout::state_width() const {
  std::int64_t width = 0;
  for (std::size_t i = 1; i < fields.size(); ++i) width += fields[i].count;
  return width;
}

RowLayout RowLayout::make(std::int64_t dim, const OptimizerConfig& optimizer) {
  if (dim < 1 || dim > kMaxDim) {
    throw std::invalid_argument("dim is " + std::to_string(dim) + "; pass 1 to " +
                                std::to_string(kMaxDim));
  }
  optimizer.validate();
  RowLayout layout{dim, 0, {}};
  add_field(layout, "weight", dim, 0.0F);
  switch (optimizer.kind) {
    case OptimizerKind::kSgd:
      break;
    case OptimizerKind::kAdagrad:
      add_field(layout, "sum", dim, optimizer.initial_accumulator_value);
      break;
    case OptimizerKind::kRowwiseAdagrad:
      add_field(layout, "sum", 1, optimizer.initial_accumulator_value);
      break;
    case OptimizerKind::kAdam:
      add_field(layout, "exp_avg", dim, 0.0F);
      add_field(layout, "exp_avg_sq", dim, 0.0F);
      if (optimizer.bias_correction == BiasCorrection::kRow) add_field(layout, "step", 1, 0.0F);
      break;
  }
  return layout;
}

}  // namespace recsdk
