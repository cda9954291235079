#include "waits.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace npusim {
namespace {

using c10::IValue;

/// In torch's sources for cuda they read a size or a number, or look whether LAPACK's work failed.
constexpr std::array kWaiting = {"aten::nonzero",         "aten::masked_select",
                                 "aten::_unique",         "aten::_unique2",
                                 "aten::unique_dim",      "aten::unique_consecutive",
                                 "aten::equal",           "aten::unique_dim_consecutive",
                                 "aten::bincount",        "aten::_linalg_eigh",
                                 "aten::_linalg_svd",     "aten::linalg_eig",
                                 "aten::_linalg_eigvals", "aten::cholesky"};

const IValue* argument(const c10::OperatorHandle& op, const IValue* arguments,
                       std::string_view name) {
  const auto& known = op.schema().arguments();
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (known[i].name() == name) return arguments + i;
  }
  return nullptr;
}

bool is_true(const IValue* value) { return value != nullptr && value->isBool() && value->toBool(); }

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte;
}

/// Of a write to masks: each is made to positions, of which only the device knows how many there
/// are. A single one is not if it takes one number that lies on the host. (Reads call nonzero.)
std::int64_t waits_of_masks(const c10::OperatorHandle& op, const IValue* arguments) {
  const IValue* indices = argument(op, arguments, "indices");
  if (indices == nullptr) return 0;
  std::int64_t masks = 0, others = 0;
  for (const std::optional<at::Tensor>& each : indices->toOptionalTensorVector()) {
    if (each && each->defined()) ++(is_mask(*each) ? masks : others);
  }
  const IValue* values = argument(op, arguments, "values");
  const bool takes_number = values != nullptr && values->isTensor() &&
                            values->toTensor().numel() == 1 && values->toTensor().is_cpu();
  const bool fills = takes_number && !is_true(argument(op, arguments, "accumulate"));
  return fills && masks == 1 && others == 0 ? 0 : masks;
}

}  // namespace

std::int64_t waits_of(const c10::OperatorHandle& op, const IValue* arguments) {
  const std::string_view name = op.schema().name();
  if (std::find(kWaiting.begin(), kWaiting.end(), name) != kWaiting.end()) return 1;
  if (name == "aten::repeat_interleave") {
    const IValue* size = argument(op, arguments, "output_size");
    return size == nullptr || size->isNone() ? 1 : 0;
  }
  if (name == "aten::normal") {  // of spreads: none may be negative
    const IValue* spread = argument(op, arguments, "std");
    return spread != nullptr && spread->isTensor() ? 1 : 0;
  }
  if (is_true(argument(op, arguments, "check_errors"))) return 1;
  return name == "aten::_index_put_impl_" ? waits_of_masks(op, arguments) : 0;
}

}  // namespace npusim
