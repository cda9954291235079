#include "recsdk/row_layout.h"

#include <stdexcept>
#include <string>

#include "util/must.h"

namespace recsdk {
namespace {

// Fields of a record start and end at 16 bytes, so that kernels may use whole 16-byte steps.
constexpr std::int64_t kFieldAlignment = 16;

// Mark of a row without an update, for catching up: no sum of logarithms of numbers below 1 is 1.
constexpr float kNotUpdated = 1.0F;

constexpr auto kFloatBytes = static_cast<std::int64_t>(sizeof(float));

void add_columns(RowLayout& layout, const char* name, float initial_value,
                 DType dtype = DType::kFloat32) {
  layout.fields.push_back(
      {name, dtype, FieldPlace::kRecord, layout.stride, layout.dim, initial_value});
  const std::int64_t bytes = layout.dim * bytes_of(dtype);
  layout.stride += (bytes + kFieldAlignment - 1) / kFieldAlignment * kFieldAlignment;
}

void add_scalars(RowLayout& layout, const char* name, float initial_value, std::int64_t count = 1) {
  layout.fields.push_back(
      {name, DType::kFloat32, FieldPlace::kScalars, layout.scalar_stride, count, initial_value});
  layout.scalar_stride += count * kFloatBytes;
}

void add_state(RowLayout& layout, const OptimizerConfig& optimizer) {
  switch (optimizer.kind) {
    case OptimizerKind::kSgd:
      if (optimizer.momentum != 0.0F) add_columns(layout, "momentum_buffer", 0.0F);
      break;
    case OptimizerKind::kAdagrad:
      return add_columns(layout, "sum", optimizer.initial_accumulator_value);
    case OptimizerKind::kRowwiseAdagrad:
      return add_scalars(layout, "sum", optimizer.initial_accumulator_value);
    case OptimizerKind::kAdam:
    case OptimizerKind::kLamb:
      add_columns(layout, "exp_avg", 0.0F);
      return add_columns(layout, "exp_avg_sq", 0.0F);
    case OptimizerKind::kPartialRowwiseAdam:
      add_columns(layout, "exp_avg", 0.0F);
      return add_scalars(layout, "exp_avg_sq", 0.0F);
    case OptimizerKind::kFtrl:
      add_columns(layout, "accumulator", optimizer.initial_accumulator_value);
      return add_columns(layout, "linear", 0.0F);
    case OptimizerKind::kRmsprop:
      add_columns(layout, "square_avg", 0.0F);
      if (optimizer.centered) add_columns(layout, "grad_avg", 0.0F);
      if (optimizer.momentum != 0.0F) add_columns(layout, "momentum_buffer", 0.0F);
      break;
  }
}

}  // namespace

std::int64_t RowLayout::state_width() const {
  std::int64_t width = 0;
  for (std::size_t i = 1; i < fields.size(); ++i) width += fields[i].count;
  return width;
}

RowLayout RowLayout::make(std::int64_t dim, const OptimizerConfig& optimizer, DType weight_dtype) {
  if (dim < 1 || dim > kMaxDim) {
    throw std::invalid_argument(internal::must("dim", "be 1 to " + std::to_string(kMaxDim), dim));
  }
  if (weight_dtype > DType::kFloat16) {
    throw std::invalid_argument(internal::must("weight_dtype", "be one of DType", weight_dtype));
  }
  optimizer.validate();
  RowLayout layout{dim, 0, 0, {}};
  add_columns(layout, "weight", 0.0F, weight_dtype);
  add_state(layout, optimizer);
  const bool counts_updates =
      optimizer.bias_correction == BiasCorrection::kRow || optimizer.dampening != 0.0;
  if (counts_updates) add_scalars(layout, "step", 0.0F);
  if (optimizer.catch_up) add_scalars(layout, "log_decay", kNotUpdated, 2);
  return layout;
}

}  // namespace recsdk
