// The operators of recsdk_core.nn's serving modules, by torch's stable ABI: what they compute is
// what recsdk_core/nn/serving_operators.py computes, bit for bit.
//
// Shape letters: N keys, B bags, D row width.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/serving/c_api.h"
#include "tables.h"

namespace recsdk::serving_torch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::StableLibrary;

std::int64_t product(std::span<const std::int64_t> sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

std::vector<std::int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

void require(bool is_so, const std::string& message) {
  if (!is_so) throw std::runtime_error(message);
}

/// Keys one after the other.
class Keys {
 public:
  explicit Keys(const Tensor& keys) : keys_(torch::stable::contiguous(keys)) {
    const ScalarType dtype = keys_.scalar_type();
    require(keys_.is_cpu() && (dtype == ScalarType::Long || dtype == ScalarType::UInt64),
            "keys of a frozen table must be int64 on the cpu");
  }
  std::span<const std::int64_t> all() const {
    return {static_cast<const std::int64_t*>(keys_.const_data_ptr()),
            static_cast<std::size_t>(keys_.numel())};
  }

 private:
  Tensor keys_;
};

Table named(const std::optional<std::string>& place, std::int64_t dim) {
  require(place.has_value(),
          "the program was compiled for tables of its own process; export it with torch.export");
  return table_of(*place, dim);
}

Tensor float_tensor(const Tensor& like, const std::vector<std::int64_t>& sizes) {
  return torch::stable::new_empty(like, sizes, ScalarType::Float);
}

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

Tensor lookup(const Tensor& keys, std::int64_t dim, const std::optional<std::string>& place,
              const std::optional<Tensor>& /*number*/) {
  const Table table = named(place, dim);
  const Keys words(keys);
  std::vector<std::int64_t> sizes = sizes_of(keys);
  sizes.push_back(dim);
  Tensor values = float_tensor(keys, sizes);
  const auto all = words.all();
  check(recsdk_serving_lookup(table.get(), all.data(), static_cast<std::int64_t>(all.size()),
                              floats_of(values), nullptr));
  return values;
}

template <typename Number>
std::vector<std::int64_t> copied(const Tensor& offsets) {
  const Tensor near = torch::stable::contiguous(offsets);
  const auto* const first = static_cast<const Number*>(near.const_data_ptr());
  return {first, first + near.numel()};
}

/// Where each bag begins and the last one ends, (B + 1,).
std::vector<std::int64_t> ends_of(const Tensor& keys, const std::optional<Tensor>& offsets,
                                  bool include_last_offset) {
  std::vector<std::int64_t> ends;
  if (!offsets) {
    require(keys.dim() == 2, "keys without offsets must have two dimensions");
    ends.resize(static_cast<std::size_t>(keys.size(0) + 1));
    for (std::size_t bag = 0; bag < ends.size(); ++bag) {
      ends[bag] = static_cast<std::int64_t>(bag) * keys.size(1);
    }
    return ends;
  }
  const bool is_int = offsets->scalar_type() == ScalarType::Int;
  require(keys.dim() == 1 && offsets->dim() == 1, "keys and offsets must have one dimension");
  require(is_int || offsets->scalar_type() == ScalarType::Long, "offsets must be int64 or int32");
  ends = is_int ? copied<std::int32_t>(*offsets) : copied<std::int64_t>(*offsets);
  if (!include_last_offset) ends.push_back(keys.numel());
  require(!ends.empty() && ends.front() == 0 && ends.back() == keys.numel() &&
              std::ranges::is_sorted(ends),
          "offsets must ascend from 0 to the number of keys, " + std::to_string(keys.numel()));
  return ends;
}

/// The largest number of each bag and column, as torch.embedding_bag has it; no keys: zeros.
void pool_max(const recsdk_serving_table* table, std::span<const std::int64_t> keys,
              std::span<const std::int64_t> ends, const std::optional<std::int64_t>& padding,
              std::span<float> out, std::size_t dim) {
  std::vector<float> rows(keys.size() * dim);
  check(recsdk_serving_lookup(table, keys.data(), static_cast<std::int64_t>(keys.size()),
                              rows.data(), nullptr));
  std::ranges::fill(out, 0.0F);
  for (std::size_t bag = 0; bag + 1 < ends.size(); ++bag) {
    const auto pooled = out.subspan(bag * dim, dim);
    bool is_empty = true;
    for (auto key = static_cast<std::size_t>(ends[bag]);
         key < static_cast<std::size_t>(ends[bag + 1]); ++key) {
      if (padding && keys[key] == *padding) continue;
      const auto row = std::span(rows).subspan(key * dim, dim);
      for (std::size_t d = 0; d < dim; ++d) {
        if (is_empty || row[d] > pooled[d]) pooled[d] = row[d];
      }
      is_empty = false;
    }
  }
}

Tensor pool(const Tensor& keys, const std::optional<Tensor>& offsets,
            const std::optional<Tensor>& weights, std::int64_t num_bags, const std::string& mode,
            bool include_last_offset, const std::optional<std::int64_t>& padding, std::int64_t dim,
            const std::optional<std::string>& place, const std::optional<Tensor>& /*number*/) {
  const Table table = named(place, dim);
  const std::vector<std::int64_t> ends = ends_of(keys, offsets, include_last_offset);
  require(static_cast<std::int64_t>(ends.size()) == num_bags + 1,
          "the program was exported for bags of another form; export it again");
  const Keys words(keys);
  const auto all = words.all();
  Tensor pooled = float_tensor(keys, {num_bags, dim});
  const auto count = static_cast<std::size_t>(num_bags * dim);
  if (mode == "max") {
    pool_max(table.get(), all, ends, padding, {floats_of(pooled), count},
             static_cast<std::size_t>(dim));
    return pooled;
  }
  require(mode == "sum" || mode == "mean", "mode must be 'sum', 'mean' or 'max', got " + mode);
  std::optional<Tensor> near;
  if (weights) {
    near = torch::stable::contiguous(*weights);
    require(near->scalar_type() == ScalarType::Float && product(near->sizes()) == keys.numel(),
            "per_sample_weights must be float32 of the shape of keys");
  }
  recsdk_serving_call call{};
  call.table = table.get();
  call.keys = all.data();
  call.num_keys = static_cast<std::int64_t>(all.size());
  call.offsets = ends.data();
  call.num_bags = num_bags;
  call.weights = near ? static_cast<const float*>(near->const_data_ptr()) : nullptr;
  call.pooling = mode == "mean" ? RECSDK_SERVING_MEAN : RECSDK_SERVING_SUM;
  call.out = floats_of(pooled);
  call.stride = dim;
  check(recsdk_serving_pool(&call, 1));
  return pooled;
}

// What recsdk_core/nn/serving_operators.py defines.
constexpr const char* kLookup =
    "serving_lookup(Tensor keys, int dim, str? place, Tensor? number) -> Tensor";
constexpr const char* kPool =
    "serving_pool(Tensor keys, Tensor? offsets, Tensor? weights, SymInt num_bags, str mode, "
    "bool include_last_offset, int? padding, int dim, str? place, Tensor? number) -> Tensor";

void define(StableLibrary& library) { library.def(kLookup).def(kPool); }

void implement(StableLibrary& library) {
  library.impl("serving_lookup", TORCH_BOX(&lookup)).impl("serving_pool", TORCH_BOX(&pool));
}

/// The operators, as long as the process lives.
struct Operators {
  StableLibrary definitions{StableLibrary::Kind::FRAGMENT, "recsdk", nullptr, __FILE__, __LINE__};
  StableLibrary kernels{StableLibrary::Kind::IMPL, "recsdk", "CompositeExplicitAutograd", __FILE__,
                        __LINE__};
  Operators() {
    define(definitions);
    implement(kernels);
  }
};

/// Beside recsdk_core.nn, which has the same operators, those stay: torch refuses to define them
/// twice.
std::unique_ptr<Operators> registered() noexcept {
  try {
    return std::make_unique<Operators>();
  } catch (const std::exception&) {
    return nullptr;
  }
}

const std::unique_ptr<Operators> kOperators = registered();

}  // namespace
}  // namespace recsdk::serving_torch
