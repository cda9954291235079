// CPU tensors over the bytes of device tensors, and the way back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace npusim {

/// A CPU tensor over the same bytes. It does not keep them alive.
at::Tensor alias_on_cpu(const at::Tensor& tensor);

/// A device tensor with the values of a CPU tensor, and its strides where it is dense.
at::Tensor move_to_device(const at::Tensor& tensor, c10::Device device);

/// The aliases of one call of an operator.
class Aliases {
 public:
  /// The alias of a device tensor; the same one for the same tensor.
  at::Tensor of(const at::Tensor& tensor);
  /// Carries over what the operator did to its arguments' sizes and storages.
  void carry_over();
  /// The device tensor for a result of the operator.
  at::Tensor result(const at::Tensor& result, c10::Device device) const;

 private:
  struct Pair {
    at::Tensor original;
    at::Tensor alias;
  };
  std::vector<Pair> pairs_;
};

}  // namespace npusim
