// Descriptors and operators of aclnn.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "fake_acl/state.h"

namespace recsdk::fake {
namespace {

using acl::DataType;
using acl::OpExecutor;
using acl::Scalar;
using acl::Tensor;
std::int64_t num_elements(const Tensor& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t dim : tensor.dims) count *= dim;
  return count;
}

std::size_t bytes_of(const Tensor& tensor) {
  const std::size_t element = tensor.dtype == DataType::kInt64 ? 8 : 4;
  return static_cast<std::size_t>(num_elements(tensor)) * element;
}

// What the device sees of a tensor; by value, for the descriptor goes before the work is done.
struct Floats {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t width = 0;

  // Broadcast along the width.
  float at(std::int64_t row, std::int64_t column) const {
    return data[row * width + (width == 1 ? 0 : column)];
  }
  std::int64_t size() const { return rows * width; }
};

struct Indexes {
  const std::int64_t* data = nullptr;
  std::int64_t size = 0;
};

// The first phase of an operator: checks of its operands, then its executor.
class Phase {
 public:
  explicit Phase(const char* name) : name_(name), lock_(state_.mutex) {
    status_ = state_.begin((name_ + "GetWorkspaceSize").c_str());
  }

  Floats matrix(const Tensor* tensor) {
    if (!take(tensor)) return {};
    require(tensor->dtype == DataType::kFloat && tensor->dims.size() == 2, "is no float matrix");
    if (status_ != acl::kSuccess) return {};
    return {static_cast<float*>(state_.seen_by_device(tensor->data)), tensor->dims[0],
            tensor->dims[1]};
  }
  Indexes indexes(const Tensor* tensor) {
    if (!take(tensor)) return {};
    require(tensor->dtype == DataType::kInt64 && tensor->dims.size() == 1, "are no indexes");
    if (status_ != acl::kSuccess) return {};
    return {static_cast<const std::int64_t*>(state_.seen_by_device(tensor->data)), tensor->dims[0]};
  }
  float number(const Scalar* scalar) {
    require(state_.scalars.contains(scalar), "has a scalar that is destroyed");
    return status_ == acl::kSuccess ? scalar->value : 0.0F;
  }
  void require(bool holds, const std::string& what) {
    if (status_ == acl::kSuccess && !holds) status_ = state_.violate(name_ + " " + what);
  }
  // `other` has the shape of `self`, or one column.
  void require_fit(const Floats& self, const Floats& other) {
    require(self.rows == other.rows && (other.width == self.width || other.width == 1),
            "has operands of other shapes");
  }
  bool knows_array(const acl::IntArray* array) { return state_.int_arrays.contains(array); }

  Status finish(std::uint64_t* workspace_size, OpExecutor** executor, std::function<void()> run) {
    if (status_ != acl::kSuccess) return status_;
    auto* const made = new OpExecutor{name_, tensors_, workspace_bytes(), std::move(run)};
    state_.executors.insert(made);
    *workspace_size = made->workspace_size;
    *executor = made;
    return acl::kSuccess;
  }

 private:
  bool take(const Tensor* tensor) {
    require(state_.tensors.contains(tensor), "has a tensor that is destroyed");
    if (status_ == acl::kSuccess) tensors_.push_back(tensor);
    return status_ == acl::kSuccess;
  }
  // None, some, more: as operators do.
  std::uint64_t workspace_bytes() const {
    return static_cast<std::uint64_t>(state_.num_calls % 3) * 512;
  }

  State& state_ = State::get();
  std::string name_;
  Lock lock_;
  Status status_ = acl::kSuccess;
  std::vector<const Tensor*> tensors_;
};

// The second phase. It takes the executor, whatever becomes of it.
Status launch(const char* name, void* workspace, std::uint64_t size, OpExecutor* executor,
              acl::Stream handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin(name);
  const std::string call = name;
  if (!state.executors.contains(executor))
    return state.violate(call + " with an executor that was launched or destroyed");
  const std::unique_ptr<OpExecutor> taken(executor);
  state.executors.erase(executor);
  if (status != acl::kSuccess) return status;
  if (taken->name != call) return state.violate(call + " with an executor of " + taken->name);
  if (size != taken->workspace_size) return state.violate(call + " with a wrong workspace size");
  const auto stream = state.streams.find(static_cast<Stream*>(handle));
  if (stream == state.streams.end())
    return state.violate(call + " on a stream that does not exist");
  if (stream->second->context != current_context)
    return state.violate(call + " on a stream of another context");
  std::vector<const void*> blocks;
  for (const Tensor* const tensor : taken->tensors) {
    if (!state.tensors.contains(tensor))
      return state.violate(call + " after a descriptor was destroyed");
    const Block* const block = state.find(name, tensor->data, bytes_of(*tensor), true);
    if (block == nullptr) return kInvalidParam;
    blocks.push_back(block->user);
  }
  void* scribbled = nullptr;
  if (size != 0) {
    const Block* const block = state.find(name, workspace, size, true);
    if (block == nullptr) return kInvalidParam;
    blocks.push_back(block->user);
    scribbled = state.seen_by_device(workspace);
  }
  state.submit(*stream->second, std::move(blocks), [scribbled, size, run = taken->run] {
    if (scribbled != nullptr) std::memset(scribbled, 0xAB, size);
    run();
  });
  return acl::kSuccess;
}

void violate(const char* what) {
  State& state = State::get();
  const Lock lock(state.mutex);
  state.violate(what);
}

bool are_within(const Indexes& indexes, std::int64_t num_rows) {
  return std::all_of(indexes.data, indexes.data + indexes.size,
                     [&](std::int64_t row) { return row >= 0 && row < num_rows; });
}

void select(const Floats& self, const Indexes& indexes, const Floats& out) {
  if (!are_within(indexes, self.rows)) return violate("aclnnIndexSelect beyond the rows");
  for (std::int64_t i = 0; i < indexes.size; ++i)
    std::copy_n(self.data + indexes.data[i] * self.width, self.width, out.data + i * self.width);
}

void copy_rows(const Floats& self, const Indexes& indexes, const Floats& source) {
  if (!are_within(indexes, self.rows)) return violate("aclnnInplaceIndexCopy beyond the rows");
  const std::set<std::int64_t> distinct(indexes.data, indexes.data + indexes.size);
  if (static_cast<std::int64_t>(distinct.size()) != indexes.size)
    return violate("aclnnInplaceIndexCopy of equal rows, whose order is not defined");
  for (std::int64_t i = 0; i < indexes.size; ++i)
    std::copy_n(source.data + i * self.width, self.width, self.data + indexes.data[i] * self.width);
}

// self[r, c] = make(self[r, c], r, c)
template <typename Make>
void for_each(const Floats& self, const Make& make) {
  for (std::int64_t r = 0; r < self.rows; ++r) {
    for (std::int64_t c = 0; c < self.width; ++c) {
      float& value = self.data[r * self.width + c];
      value = make(value, r, c);
    }
  }
}

}  // namespace
}  // namespace recsdk::fake

using namespace recsdk::fake;  // NOLINT(google-build-using-namespace)
using acl::DataType;
using acl::IntArray;
using acl::OpExecutor;
using acl::Scalar;
using acl::Tensor;

#define FAKE_ACL_LAUNCH(name)                                                         \
  FAKE_ACL_API Status name(void* workspace, std::uint64_t size, OpExecutor* executor, \
                           acl::Stream stream) {                                      \
    return launch(#name, workspace, size, executor, stream);                          \
  }

extern "C" {

FAKE_ACL_API Tensor* aclCreateTensor(const std::int64_t* view_dims, std::uint64_t num_view_dims,
                                     DataType dtype, const std::int64_t* strides,
                                     std::int64_t offset, acl::Format format,
                                     const std::int64_t* storage_dims,
                                     std::uint64_t num_storage_dims, void* data) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (state.begin("aclCreateTensor", false) != acl::kSuccess) return nullptr;
  Tensor made{{view_dims, view_dims + num_view_dims}, dtype, data};
  const std::vector<std::int64_t> storage(storage_dims, storage_dims + num_storage_dims);
  std::int64_t stride = 1;
  bool is_plain = offset == 0 && format == acl::Format::kNd && storage == made.dims;
  for (std::size_t d = made.dims.size(); d-- > 0;) {
    is_plain = is_plain && strides[d] == stride && made.dims[d] > 0;
    stride *= made.dims[d];
  }
  if (!is_plain) {
    state.violate("aclCreateTensor of what is not contiguous, or empty");
    return nullptr;
  }
  if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) {
    state.violate("aclCreateTensor at an address that is not 64-byte aligned");
    return nullptr;
  }
  if (state.find("aclCreateTensor", data, bytes_of(made), true) == nullptr) return nullptr;
  auto* const tensor = new Tensor(std::move(made));
  state.tensors.insert(tensor);
  return tensor;
}

FAKE_ACL_API Status aclDestroyTensor(const Tensor* tensor) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclDestroyTensor", false);
  if (state.tensors.erase(tensor) == 0) return state.violate("aclDestroyTensor twice");
  delete tensor;
  return status;
}

FAKE_ACL_API Scalar* aclCreateScalar(void* value, DataType dtype) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (state.begin("aclCreateScalar", false) != acl::kSuccess) return nullptr;
  if (dtype != DataType::kFloat) {
    state.violate("aclCreateScalar of what is no float");
    return nullptr;
  }
  auto* const scalar = new Scalar{*static_cast<float*>(value)};
  state.scalars.insert(scalar);
  return scalar;
}

FAKE_ACL_API Status aclDestroyScalar(const Scalar* scalar) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclDestroyScalar", false);
  if (state.scalars.erase(scalar) == 0) return state.violate("aclDestroyScalar twice");
  delete scalar;
  return status;
}

FAKE_ACL_API IntArray* aclCreateIntArray(const std::int64_t* values, std::uint64_t size) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (state.begin("aclCreateIntArray", false) != acl::kSuccess) return nullptr;
  auto* const array = new IntArray{{values, values + size}};
  state.int_arrays.insert(array);
  return array;
}

FAKE_ACL_API Status aclDestroyIntArray(const IntArray* array) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclDestroyIntArray", false);
  if (state.int_arrays.erase(array) == 0) return state.violate("aclDestroyIntArray twice");
  delete array;
  return status;
}

FAKE_ACL_API Status aclDestroyAclOpExecutor(OpExecutor* executor) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclDestroyAclOpExecutor", false);
  if (state.executors.erase(executor) == 0)
    return state.violate("aclDestroyAclOpExecutor of one that was launched or destroyed");
  delete executor;
  return status;
}

FAKE_ACL_API Status aclnnIndexSelectGetWorkspaceSize(const Tensor* self, std::int64_t dim,
                                                     const Tensor* index, Tensor* out,
                                                     std::uint64_t* workspace_size,
                                                     OpExecutor** executor) {
  Phase phase("aclnnIndexSelect");
  const Floats from = phase.matrix(self);
  const Indexes rows = phase.indexes(index);
  const Floats to = phase.matrix(out);
  phase.require(dim == 0 && to.rows == rows.size && to.width == from.width, "has a wrong out");
  return phase.finish(workspace_size, executor, [from, rows, to] { select(from, rows, to); });
}
FAKE_ACL_LAUNCH(aclnnIndexSelect)

FAKE_ACL_API Status aclnnInplaceIndexCopyGetWorkspaceSize(Tensor* self, std::int64_t dim,
                                                          const Tensor* index, const Tensor* source,
                                                          std::uint64_t* workspace_size,
                                                          OpExecutor** executor) {
  Phase phase("aclnnInplaceIndexCopy");
  const Floats to = phase.matrix(self);
  const Indexes rows = phase.indexes(index);
  const Floats from = phase.matrix(source);
  phase.require(dim == 0 && from.rows == rows.size && to.width == from.width, "has a wrong source");
  return phase.finish(workspace_size, executor, [to, rows, from] { copy_rows(to, rows, from); });
}
FAKE_ACL_LAUNCH(aclnnInplaceIndexCopy)

FAKE_ACL_API Status aclnnInplaceAddGetWorkspaceSize(const Tensor* self, const Tensor* other,
                                                    const Scalar* alpha,
                                                    std::uint64_t* workspace_size,
                                                    OpExecutor** executor) {
  Phase phase("aclnnInplaceAdd");
  const Floats a = phase.matrix(self);
  const Floats b = phase.matrix(other);
  const float factor = phase.number(alpha);
  phase.require_fit(a, b);
  return phase.finish(workspace_size, executor, [a, b, factor] {
    for_each(a, [&](float x, std::int64_t r, std::int64_t c) { return x + factor * b.at(r, c); });
  });
}
FAKE_ACL_LAUNCH(aclnnInplaceAdd)

FAKE_ACL_API Status aclnnInplaceAddsGetWorkspaceSize(const Tensor* self, const Scalar* other,
                                                     const Scalar* alpha,
                                                     std::uint64_t* workspace_size,
                                                     OpExecutor** executor) {
  Phase phase("aclnnInplaceAdds");
  const Floats a = phase.matrix(self);
  const float addend = phase.number(other) * phase.number(alpha);
  return phase.finish(workspace_size, executor, [a, addend] {
    for_each(a, [&](float x, std::int64_t, std::int64_t) { return x + addend; });
  });
}
FAKE_ACL_LAUNCH(aclnnInplaceAdds)

FAKE_ACL_API Status aclnnInplaceMulsGetWorkspaceSize(Tensor* self, const Scalar* other,
                                                     std::uint64_t* workspace_size,
                                                     OpExecutor** executor) {
  Phase phase("aclnnInplaceMuls");
  const Floats a = phase.matrix(self);
  const float factor = phase.number(other);
  return phase.finish(workspace_size, executor, [a, factor] {
    for_each(a, [&](float x, std::int64_t, std::int64_t) { return x * factor; });
  });
}
FAKE_ACL_LAUNCH(aclnnInplaceMuls)

FAKE_ACL_API Status aclnnInplaceAddcmulGetWorkspaceSize(const Tensor* self, const Tensor* factor1,
                                                        const Tensor* factor2, const Scalar* value,
                                                        std::uint64_t* workspace_size,
                                                        OpExecutor** executor) {
  Phase phase("aclnnInplaceAddcmul");
  const Floats a = phase.matrix(self);
  const Floats b = phase.matrix(factor1);
  const Floats d = phase.matrix(factor2);
  const float factor = phase.number(value);
  phase.require_fit(a, b);
  phase.require_fit(a, d);
  return phase.finish(workspace_size, executor, [a, b, d, factor] {
    for_each(a, [&](float x, std::int64_t r, std::int64_t c) {
      return x + factor * (b.at(r, c) * d.at(r, c));
    });
  });
}
FAKE_ACL_LAUNCH(aclnnInplaceAddcmul)

FAKE_ACL_API Status aclnnInplaceAddcdivGetWorkspaceSize(const Tensor* self, const Tensor* numerator,
                                                        const Tensor* denominator,
                                                        const Scalar* value,
                                                        std::uint64_t* workspace_size,
                                                        OpExecutor** executor) {
  Phase phase("aclnnInplaceAddcdiv");
  const Floats a = phase.matrix(self);
  const Floats b = phase.matrix(numerator);
  const Floats d = phase.matrix(denominator);
  const float factor = phase.number(value);
  phase.require_fit(a, b);
  phase.require_fit(a, d);
  return phase.finish(workspace_size, executor, [a, b, d, factor] {
    for_each(a, [&](float x, std::int64_t r, std::int64_t c) {
      return x + factor * (b.at(r, c) / d.at(r, c));
    });
  });
}
FAKE_ACL_LAUNCH(aclnnInplaceAddcdiv)

FAKE_ACL_API Status aclnnMulGetWorkspaceSize(const Tensor* self, const Tensor* other, Tensor* out,
                                             std::uint64_t* workspace_size, OpExecutor** executor) {
  Phase phase("aclnnMul");
  const Floats a = phase.matrix(self);
  const Floats b = phase.matrix(other);
  const Floats to = phase.matrix(out);
  phase.require_fit(to, a);
  phase.require_fit(to, b);
  return phase.finish(workspace_size, executor, [a, b, to] {
    for_each(to, [&](float, std::int64_t r, std::int64_t c) { return a.at(r, c) * b.at(r, c); });
  });
}
FAKE_ACL_LAUNCH(aclnnMul)

FAKE_ACL_API Status aclnnSqrtGetWorkspaceSize(const Tensor* self, Tensor* out,
                                              std::uint64_t* workspace_size,
                                              OpExecutor** executor) {
  Phase phase("aclnnSqrt");
  const Floats a = phase.matrix(self);
  const Floats to = phase.matrix(out);
  phase.require(a.rows == to.rows && a.width == to.width, "has a wrong out");
  return phase.finish(workspace_size, executor, [a, to] {
    for_each(to, [&](float, std::int64_t r, std::int64_t c) { return std::sqrt(a.at(r, c)); });
  });
}
FAKE_ACL_LAUNCH(aclnnSqrt)

FAKE_ACL_API Status aclnnMeanGetWorkspaceSize(const Tensor* self, const IntArray* dims,
                                              bool keep_dims, DataType dtype, Tensor* out,
                                              std::uint64_t* workspace_size,
                                              OpExecutor** executor) {
  Phase phase("aclnnMean");
  const Floats a = phase.matrix(self);
  const Floats to = phase.matrix(out);
  phase.require(phase.knows_array(dims) && dims->values == std::vector<std::int64_t>{1} &&
                    keep_dims && dtype == DataType::kFloat && to.rows == a.rows && to.width == 1,
                "is not of the columns");
  return phase.finish(workspace_size, executor, [a, to] {
    for_each(to, [&](float, std::int64_t r, std::int64_t) {
      float sum = 0.0F;
      for (std::int64_t c = 0; c < a.width; ++c) sum += a.at(r, c);
      return sum / static_cast<float>(a.width);
    });
  });
}
FAKE_ACL_LAUNCH(aclnnMean)

}  // extern "C"
