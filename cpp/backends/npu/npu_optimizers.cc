// Optimizers out of elementwise operators. Formulas: recsdk/optimizer.h. Every tensor is contiguous
// and starts at an aligned address; nothing is read that an operator beside it writes.
#include "backends/npu/npu_run.h"
#include "backends/npu/npu_stream.h"

namespace recsdk::internal {

struct NpuStream::UpdateTensors {
  TensorHandle gradients;
  TensorHandle weights;
  TensorHandle first;
  TensorHandle second;
  TensorHandle scratch;
};

void NpuStream::scale(const TensorHandle& self, float factor) {
  const ScalarHandle by = scalar(factor);
  run(library_.aclnnInplaceMuls, self.get(), by.get());
}

void NpuStream::add_scaled(const TensorHandle& self, const TensorHandle& other, float factor) {
  const ScalarHandle by = scalar(factor);
  run(library_.aclnnInplaceAdd, self.get(), other.get(), by.get());
}

void NpuStream::add_product(const TensorHandle& self, const TensorHandle& a, const TensorHandle& b,
                            float factor) {
  const ScalarHandle by = scalar(factor);
  run(library_.aclnnInplaceAddcmul, self.get(), a.get(), b.get(), by.get());
}

void NpuStream::add_quotient(const TensorHandle& self, const TensorHandle& a, const TensorHandle& b,
                             float factor) {
  const ScalarHandle by = scalar(factor);
  run(library_.aclnnInplaceAddcdiv, self.get(), a.get(), b.get(), by.get());
}

// out = sqrt(squares) * factor + eps
void NpuStream::denominator(const TensorHandle& squares, const TensorHandle& out, float factor,
                            float eps) {
  run(library_.aclnnSqrt, squares.get(), out.get());
  if (factor != 1.0F) scale(out, factor);
  const ScalarHandle addend = scalar(eps);
  const ScalarHandle one = scalar(1.0F);
  run(library_.aclnnInplaceAdds, out.get(), addend.get(), one.get());
}

void NpuStream::update_sgd(const UpdateStep& step, const UpdateTensors& rows) {
  if (!step.has_momentum) return add_scaled(rows.weights, rows.gradients, -step.learning_rate);
  scale(rows.first, step.momentum);
  add_scaled(rows.first, rows.gradients, 1.0F);
  if (!step.is_nesterov) return add_scaled(rows.weights, rows.first, -step.learning_rate);
  add_scaled(rows.gradients, rows.first, step.momentum);
  add_scaled(rows.weights, rows.gradients, -step.learning_rate);
}

void NpuStream::update_adagrad(const UpdateStep& step, const UpdateTensors& rows) {
  add_product(rows.first, rows.gradients, rows.gradients, 1.0F);
  denominator(rows.first, rows.scratch, 1.0F, step.eps);
  add_quotient(rows.weights, rows.gradients, rows.scratch, -step.learning_rate);
}

// rows.first is (N, 1). The second scratch holds the means, then the denominators.
void NpuStream::update_rowwise_adagrad(const UpdateStep& step, const UpdateTensors& rows,
                                       const UpdateRows& memory) {
  run(library_.aclnnMul, rows.gradients.get(), rows.gradients.get(), rows.scratch.get());
  const std::int64_t dims[1] = {1};
  const acl::Descriptor<acl::IntArray> axis(
      library_.check(library_.aclCreateIntArray(dims, 1), "aclCreateIntArray"),
      library_.aclDestroyIntArray);
  const TensorHandle column = matrix(memory.scratch[1], memory.num_rows, 1);
  run(library_.aclnnMean, rows.scratch.get(), axis.get(), true, acl::DataType::kFloat,
      column.get());
  add_scaled(rows.first, column, 1.0F);
  denominator(rows.first, column, 1.0F, step.eps);
  add_quotient(rows.weights, rows.gradients, column, -step.learning_rate);
}

void NpuStream::update_adam(const UpdateStep& step, const UpdateTensors& rows) {
  scale(rows.first, step.beta1);
  add_scaled(rows.first, rows.gradients, step.one_minus_beta1);
  scale(rows.second, step.beta2);
  add_product(rows.second, rows.gradients, rows.gradients, step.one_minus_beta2);
  denominator(rows.second, rows.scratch, step.inv_sqrt_bias2, step.eps);
  add_quotient(rows.weights, rows.first, rows.scratch, -step.learning_rate);
}

void NpuStream::update(const UpdateStep& step, const UpdateRows& rows) {
  if (rows.num_rows == 0) return;
  const auto made = [&](const float* data, std::int64_t width) {
    return data == nullptr ? TensorHandle{nullptr, library_.aclDestroyTensor}
                           : matrix(data, rows.num_rows, width);
  };
  const std::int64_t first_width = step.kind == OptimizerKind::kRowwiseAdagrad ? 1 : rows.dim;
  const UpdateTensors tensors{made(rows.gradients, rows.dim), made(rows.weights, rows.dim),
                              made(rows.state[0], first_width), made(rows.state[1], rows.dim),
                              made(rows.scratch[0], rows.dim)};
  if (step.l2 != 0.0F) add_scaled(tensors.gradients, tensors.weights, step.l2);
  if (step.decay_factor != 1.0F) scale(tensors.weights, step.decay_factor);
  switch (step.kind) {
    case OptimizerKind::kAdagrad:
      return update_adagrad(step, tensors);
    case OptimizerKind::kRowwiseAdagrad:
      return update_rowwise_adagrad(step, tensors, rows);
    case OptimizerKind::kAdam:
      return update_adam(step, tensors);
    default:
      return update_sgd(step, tensors);
  }
}

}  // namespace recsdk::internal
