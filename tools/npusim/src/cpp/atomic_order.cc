// Source of which operators these are: the lists of torch.use_deterministic_algorithms, and
// Ascend's documentation.
#include "atomic_order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <mutex>
#include <optional>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace npusim {
namespace {

using c10::IValue;

/// A random order of so many items. Takes nothing from torch's generators, whose numbers tests fix.
at::Tensor any_order(std::int64_t count) {
  static std::mutex mutex;
  static at::Generator generator = at::detail::createCPUGenerator(
      (std::uint64_t{std::random_device{}()} << 32) + std::random_device{}());
  const std::lock_guard lock(mutex);
  return at::randperm(count, generator, at::TensorOptions(at::kLong));
}

/// (self, dim, index (n,), source): whole slices go to their positions.
void shuffle_slices(IValue* arguments) {
  const at::Tensor index = arguments[2].toTensor();
  const at::Tensor source = arguments[3].toTensor();
  if (index.numel() < 2) return;
  const at::Tensor order = any_order(index.numel());
  arguments[2] = index.index_select(0, order);
  arguments[3] = source.index_select(arguments[1].toInt(), order);
}

/// (self, dim, index, source): each element goes to a position along the dimension.
void shuffle_elements(IValue* arguments) {
  const std::int64_t dim = arguments[1].toInt();
  const at::Tensor index = arguments[2].toTensor();
  if (!arguments[3].isTensor()) return;
  at::Tensor source = arguments[3].toTensor();
  if (index.dim() == 0 || index.size(dim) < 2) return;
  for (std::int64_t i = 0; i < index.dim(); ++i) source = source.narrow(i, 0, index.size(i));
  const at::Tensor order = any_order(index.size(dim));
  arguments[2] = index.index_select(dim, order);
  arguments[3] = source.index_select(dim, order);
}

/// (self, index, source): each element goes to a position among all of self's.
void shuffle_puts(IValue* arguments) {
  const at::Tensor index = arguments[1].toTensor().reshape(-1);
  const at::Tensor order = any_order(index.numel());
  arguments[1] = index.index_select(0, order);
  arguments[2] = arguments[2].toTensor().reshape(-1).index_select(0, order);
}

/// (self, indices, values, accumulate): the gradient of indexing. The tuples of positions are
/// shuffled where all indices are numbers and come first, as in `x[i, j]`.
void shuffle_index_put(IValue* arguments) {
  const at::Tensor self = arguments[0].toTensor();
  std::vector<at::Tensor> indices;
  for (const std::optional<at::Tensor>& each : arguments[1].toOptionalTensorVector()) {
    if (!each || !each->defined()) break;
    if (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte) return;
    indices.push_back(*each);
  }
  if (!arguments[3].toBool() || indices.size() != arguments[1].toListRef().size()) return;
  indices = at::broadcast_tensors(indices);
  std::vector<std::int64_t> shape = indices.at(0).sizes().vec();
  const auto kept = self.sizes().slice(indices.size());
  shape.insert(shape.end(), kept.begin(), kept.end());
  const at::Tensor values = arguments[2].toTensor().expand(shape);
  const at::Tensor order = any_order(indices.at(0).numel());
  c10::List<std::optional<at::Tensor>> shuffled;
  for (const at::Tensor& each : indices) {
    shuffled.push_back(each.reshape(-1).index_select(0, order));
  }
  shape.erase(shape.begin(), shape.begin() + indices.at(0).dim());
  shape.insert(shape.begin(), indices.at(0).numel());
  arguments[1] = IValue(std::move(shuffled));
  arguments[2] = values.reshape(shape).index_select(0, order);
}

/// (self, weights, minlength): the weights of equal numbers are added.
void shuffle_bins(IValue* arguments) {
  if (!arguments[1].isTensor() || !arguments[1].toTensor().defined()) return;
  const at::Tensor order = any_order(arguments[0].toTensor().numel());
  arguments[0] = arguments[0].toTensor().index_select(0, order);
  arguments[1] = arguments[1].toTensor().index_select(0, order);
}

/// (grad, indices, ...): slices go to their positions, unless deterministic computing is on.
void shuffle_gradients(IValue* arguments) {
  const at::Tensor index = arguments[1].toTensor().reshape(-1);
  if (at::globalContext().deterministicAlgorithms() || index.numel() < 2) return;
  const at::Tensor grad = arguments[0].toTensor();
  const at::Tensor order = any_order(index.numel());
  arguments[0] = grad.reshape({index.numel(), grad.size(-1)}).index_select(0, order);
  arguments[1] = index.index_select(0, order);
}

using Shuffle = void (*)(IValue*);

const std::unordered_map<std::string, Shuffle>& shuffles() {
  static const std::unordered_map<std::string, Shuffle> found = {
      {"aten::index_add", shuffle_slices},
      {"aten::index_add_", shuffle_slices},
      {"aten::index_copy", shuffle_slices},
      {"aten::index_copy_", shuffle_slices},
      {"aten::scatter", shuffle_elements},
      {"aten::scatter_", shuffle_elements},
      {"aten::scatter_add", shuffle_elements},
      {"aten::scatter_add_", shuffle_elements},
      {"aten::scatter_reduce", shuffle_elements},
      {"aten::scatter_reduce_", shuffle_elements},
      {"aten::_index_put_impl_", shuffle_index_put},
      {"aten::index_put_", shuffle_index_put},
      {"aten::put_", shuffle_puts},
      {"aten::bincount", shuffle_bins},
      {"aten::embedding_dense_backward", shuffle_gradients},
  };
  return found;
}

}  // namespace

void shuffle_repeated_positions(const std::string& name, IValue* arguments) {
  const auto found = shuffles().find(name);
  if (found != shuffles().end()) found->second(arguments);
}

}  // namespace npusim
