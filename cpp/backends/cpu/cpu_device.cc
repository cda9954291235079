#include "backends/cpu/cpu_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

// One row of an update. The formulas are those of recsdk/optimizer.h.
struct RowToUpdate {
  std::int64_t dim;
  float* gradient;
  float* weights;
  float* first;
  float* second;
};

void prepare(const UpdateStep& step, const RowToUpdate& row) {
  if (step.l2 != 0.0F) {
    for (std::int64_t c = 0; c < row.dim; ++c) row.gradient[c] += step.l2 * row.weights[c];
  }
  if (step.decay_factor != 1.0F) {
    for (std::int64_t c = 0; c < row.dim; ++c) row.weights[c] *= step.decay_factor;
  }
}

void update_sgd(const UpdateStep& step, const RowToUpdate& row) {
  for (std::int64_t c = 0; c < row.dim; ++c) {
    float direction = row.gradient[c];
    if (step.has_momentum) {
      row.first[c] = row.first[c] * step.momentum + direction;
      direction = step.is_nesterov ? direction + step.momentum * row.first[c] : row.first[c];
    }
    row.weights[c] -= step.learning_rate * direction;
  }
}

void update_adagrad(const UpdateStep& step, const RowToUpdate& row) {
  for (std::int64_t c = 0; c < row.dim; ++c) {
    row.first[c] += row.gradient[c] * row.gradient[c];
    row.weights[c] -= step.learning_rate * row.gradient[c] / (std::sqrt(row.first[c]) + step.eps);
  }
}

void update_rowwise_adagrad(const UpdateStep& step, const RowToUpdate& row) {
  float squares = 0.0F;
  for (std::int64_t c = 0; c < row.dim; ++c) squares += row.gradient[c] * row.gradient[c];
  row.first[0] += squares / static_cast<float>(row.dim);
  const float rate = step.learning_rate / (std::sqrt(row.first[0]) + step.eps);
  for (std::int64_t c = 0; c < row.dim; ++c) row.weights[c] -= rate * row.gradient[c];
}

void update_adam(const UpdateStep& step, const RowToUpdate& row) {
  for (std::int64_t c = 0; c < row.dim; ++c) {
    const float g = row.gradient[c];
    row.first[c] = row.first[c] * step.beta1 + step.one_minus_beta1 * g;
    row.second[c] = row.second[c] * step.beta2 + step.one_minus_beta2 * g * g;
    const float denominator = std::sqrt(row.second[c]) * step.inv_sqrt_bias2 + step.eps;
    row.weights[c] -= step.learning_rate * row.first[c] / denominator;
  }
}

void update_row(const UpdateStep& step, const RowToUpdate& row) {
  prepare(step, row);
  switch (step.kind) {
    case OptimizerKind::kAdagrad:
      return update_adagrad(step, row);
    case OptimizerKind::kRowwiseAdagrad:
      return update_rowwise_adagrad(step, row);
    case OptimizerKind::kAdam:
      return update_adam(step, row);
    default:
      return update_sgd(step, row);
  }
}

class CpuEvent final : public DeviceEvent {
 public:
  void synchronize() override {}
};

class CpuStream final : public DeviceStream {
 public:
  void copy_to_device(void* to, const void* pinned, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(to, pinned, bytes);
  }
  void copy_to_host(void* pinned, const void* from, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(pinned, from, bytes);
  }

  void gather(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
              float* out) override {
    for (std::int64_t i = 0; i < num_rows; ++i)
      std::copy_n(table.data + rows[i] * table.width, table.width, out + i * table.width);
  }
  void scatter(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
               const float* values) override {
    for (std::int64_t i = 0; i < num_rows; ++i)
      std::copy_n(values + i * table.width, table.width, table.data + rows[i] * table.width);
  }
  void add(float* sum, const float* addend, std::int64_t num_rows, std::int64_t width) override {
    for (std::int64_t i = 0; i < num_rows * width; ++i) sum[i] += addend[i];
  }
  void update(const UpdateStep& step, const UpdateRows& rows) override {
    const std::int64_t first_width = step.kind == OptimizerKind::kRowwiseAdagrad ? 1 : rows.dim;
    for (std::int64_t i = 0; i < rows.num_rows; ++i) {
      const auto of_row = [i](float* matrix, std::int64_t width) {
        return matrix == nullptr ? nullptr : matrix + i * width;
      };
      update_row(step, {rows.dim, of_row(rows.gradients, rows.dim), of_row(rows.weights, rows.dim),
                        of_row(rows.state[0], first_width), of_row(rows.state[1], rows.dim)});
    }
  }

  void record(DeviceEvent&) override {}
  void wait(DeviceEvent&) override {}
  void synchronize() override {}
  void* native() const noexcept override { return nullptr; }
};

class CpuDevice final : public Device {
 public:
  std::string name() const override { return "cpu 0"; }

  void* allocate(std::size_t bytes) override {
    try {
      return ::operator new(bytes, std::align_val_t{kDeviceAlignment});
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::kOutOfMemory,
                  "the host has no " + std::to_string(bytes) + " bytes; ask for less");
    }
  }
  void* allocate_pinned(std::size_t bytes) override { return allocate(bytes); }
  void free(void* memory) noexcept override {
    ::operator delete(memory, std::align_val_t{kDeviceAlignment});
  }
  void free_pinned(void* memory) noexcept override { free(memory); }

  std::unique_ptr<DeviceStream> make_stream() override { return std::make_unique<CpuStream>(); }
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<CpuEvent>(); }

 private:
  void* enter() override { return nullptr; }
  void leave(void*) noexcept override {}
};

}  // namespace

std::shared_ptr<Device> open_cpu(int ordinal) {
  if (ordinal != 0) {
    throw std::invalid_argument("device of backend 'cpu' must be 0, got " +
                                std::to_string(ordinal));
  }
  return std::make_shared<CpuDevice>();
}

}  // namespace recsdk::internal
