// One boxed kernel for every operator that has none of its own: it drains the current stream and
// then runs the operator's CPU kernel on the same bytes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "alias.h"
#include "atomic_order.h"
#include "counts.h"
#include "generator.h"
#include "streams.h"
#include "waits.h"

namespace npusim {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

/// Indices may lie on the host, as for torch's other devices.
bool takes_host_tensors(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" ||
         name == "aten::_index_put_impl_" || name == "aten::_unsafe_index";
}

bool requires_grad(const IValue& value) {
  if (value.isTensor()) return value.toTensor().requires_grad();
  if (!value.isTensorList()) return false;
  const auto list = value.toTensorVector();
  return std::any_of(list.begin(), list.end(),
                     [](const at::Tensor& each) { return each.requires_grad(); });
}

/// Replaces a call's arguments by what a CPU kernel takes.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()) {}

  void to_cpu(IValue& value) {
    if (value.isTensor()) {
      value = tensor_to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& each : list) each = tensor_to_cpu(each);
      value = IValue(c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(list)));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
        list.push_back(each ? std::optional(tensor_to_cpu(*each)) : std::nullopt);
      }
      value = IValue(std::move(list));
    } else if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1) {
      note(value.toDevice());
      value = IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator() && value.toGenerator().device().type() == c10::kPrivateUse1) {
      value = IValue(cpu_generator(value.toGenerator()));
    }
  }

  IValue to_device(const IValue& value) const {
    if (value.isTensor()) return aliases_.result(value.toTensor(), *device_);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) {
      list.push_back(aliases_.result(each, *device_));
    }
    return list;
  }

  /// Throws if a tensor of several elements lies on the host.
  void check_devices() const {
    TORCH_CHECK(!has_host_tensor_ || takes_host_tensors(name_), name_, ": expected all tensors to ",
                "be on the same device, but found at least two devices, ", *device_, " and cpu");
  }

  c10::Device device() const { return *device_; }
  Aliases& aliases() { return aliases_; }

 private:
  at::Tensor tensor_to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_on_device(tensor)) {
      has_host_tensor_ = has_host_tensor_ || tensor.dim() > 0;
      return tensor;
    }
    note(tensor.device());
    return aliases_.of(tensor);
  }

  void note(c10::Device device) {
    if (!device.has_index()) device.set_index(current_device());
    TORCH_CHECK(!device_ || *device_ == device, name_, ": expected all tensors to be on the same ",
                "device, but found at least two devices, ", *device_, " and ", device);
    device_ = device;
  }

  std::string name_;
  Aliases aliases_;
  std::optional<c10::Device> device_;
  bool has_host_tensor_ = false;
};

/// Throws if the result would have no gradient, though an input requires one: the operator has no
/// autograd kernel for this device, and what its CPU kernel does below is not recorded.
void check_gradient(const c10::OperatorHandle& op, const Stack& stack, std::size_t first) {
  if (!c10::GradMode::is_enabled() ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) {
    return;
  }
  const auto& results = op.schema().returns();
  const bool gives_tensor = std::any_of(results.begin(), results.end(), [](const auto& result) {
    return result.type()->kind() == c10::TypeKind::TensorType ||
           result.type()->kind() == c10::TypeKind::ListType;
  });
  for (std::size_t i = first; gives_tensor && i < stack.size(); ++i) {
    TORCH_CHECK(!requires_grad(stack[i]), op.schema().name(), " has no gradient on npu: it would ",
                "get lost without a word; call another operator, or detach the inputs");
  }
}

/// Random operators draw from the device's generator if they are given none.
void fill_in_generator(const c10::OperatorHandle& op, Stack* stack, std::size_t first,
                       c10::DeviceIndex device) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[first + i];
    if (arguments[i].name() == "generator" && value.isNone()) value = default_cpu_generator(device);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const TimedWork timed;
  const std::size_t first = stack->size() - op.schema().arguments().size();
  check_gradient(op, *stack, first);
  const std::int64_t waits = waits_of(op, stack->data() + first);
  Call call(op);
  for (std::size_t i = first; i < stack->size(); ++i) call.to_cpu((*stack)[i]);
  call.check_devices();
  fill_in_generator(op, stack, first, call.device().index());
  count_operator(op.schema().name());
  count_waits(waits);
  const c10::DeviceGuard guard(call.device());
  drain_current_stream(call.device().index());
  {
    const at::AutoDispatchBelowAutograd below;
    shuffle_repeated_positions(op.schema().name(), stack->data() + first);
    op.callBoxed(stack);
  }
  call.aliases().carry_over();
  for (std::size_t i = first; i < stack->size(); ++i) (*stack)[i] = call.to_device((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace npusim
