// What is used of Ascend's runtime (ACL) and of its operators (aclnn), declared here so that
// nothing of CANN is needed to build. Names of functions and values are Ascend's, types are our
// own.
//
// tools/check_acl_headers.py holds RECSDK_ACL_FUNCTIONS and the values against the headers that the
// torch_npu wheel carries, and the descriptors of aclnn against the types its other headers name.
// The operators have no header there: they are as the documentation has them, and unverified.
//
// Source: "Application Development API (C)" of CANN 8.0 and 8.5, hiascend.com/document (aclInit,
// aclrt*); "Operator Acceleration Library API", the same place (aclCreate*, aclnn*).
#pragma once

#include <cstddef>
#include <cstdint>

namespace recsdk::internal::acl {

using Status = int;
using Context = void*;
using Stream = void*;
using Event = void*;

inline constexpr Status kSuccess = 0;                    // ACL_SUCCESS
inline constexpr Status kRepeatInitialize = 100002;      // ACL_ERROR_REPEAT_INITIALIZE
inline constexpr Status kBadAlloc = 200000;              // ACL_ERROR_BAD_ALLOC
inline constexpr Status kStorageOverLimit = 300000;      // ACL_ERROR_STORAGE_OVER_LIMIT
inline constexpr Status kRtMemoryAllocation = 207001;    // ACL_ERROR_RT_MEMORY_ALLOCATION
inline constexpr std::uint32_t kEventSync = 0x00000001;  // ACL_EVENT_SYNC

enum class MemMallocPolicy : int { kHugeFirst = 0 };
enum class MemcpyKind : int { kHostToDevice = 1, kDeviceToHost = 2 };
enum class DataType : int { kFloat = 0, kInt64 = 9 };
enum class Format : int { kNd = 2 };

// Descriptors, which are opaque.
struct Tensor;
struct Scalar;
struct IntArray;
struct OpExecutor;

/// The second phase of every operator: hands the work to the stream, and takes the executor.
using Launch = Status (*)(void* workspace, std::uint64_t workspace_size, OpExecutor* executor,
                          Stream stream);

}  // namespace recsdk::internal::acl

// X(result, name, parameters). Verified against headers.
#define RECSDK_ACL_FUNCTIONS(X)                                                            \
  X(Status, aclInit, (const char* config_path))                                            \
  X(const char*, aclGetRecentErrMsg, ())                                                   \
  X(Status, aclrtGetDeviceCount, (std::uint32_t* count))                                   \
  X(Status, aclrtSetDevice, (std::int32_t device))                                         \
  X(Status, aclrtResetDevice, (std::int32_t device))                                       \
  X(Status, aclrtGetCurrentContext, (Context * context))                                   \
  X(Status, aclrtSetCurrentContext, (Context context))                                     \
  X(Status, aclrtMalloc, (void** device_memory, std::size_t size, MemMallocPolicy policy)) \
  X(Status, aclrtFree, (void* device_memory))                                              \
  X(Status, aclrtMallocHost, (void** host_memory, std::size_t size))                       \
  X(Status, aclrtFreeHost, (void* host_memory))                                            \
  X(Status, aclrtMemcpyAsync,                                                              \
    (void* to, std::size_t to_size, const void* from, std::size_t size, MemcpyKind kind,   \
     Stream stream))                                                                       \
  X(Status, aclrtCreateStream, (Stream * stream))                                          \
  X(Status, aclrtDestroyStream, (Stream stream))                                           \
  X(Status, aclrtDestroyStreamForce, (Stream stream))                                      \
  X(Status, aclrtSynchronizeStream, (Stream stream))                                       \
  X(Status, aclrtCreateEventExWithFlag, (Event * event, std::uint32_t flag))               \
  X(Status, aclrtDestroyEvent, (Event event))                                              \
  X(Status, aclrtRecordEvent, (Event event, Stream stream))                                \
  X(Status, aclrtStreamWaitEvent, (Stream stream, Event event))                            \
  X(Status, aclrtSynchronizeEvent, (Event event))

// Descriptors of aclnn. Verified against what the wheel's other headers say of them.
#define RECSDK_ACLNN_DESCRIPTORS(X)                                                 \
  X(Tensor*, aclCreateTensor,                                                       \
    (const std::int64_t* view_dims, std::uint64_t num_view_dims, DataType dtype,    \
     const std::int64_t* strides, std::int64_t offset, Format format,               \
     const std::int64_t* storage_dims, std::uint64_t num_storage_dims, void* data)) \
  X(Status, aclDestroyTensor, (const Tensor* tensor))                               \
  X(Scalar*, aclCreateScalar, (void* value, DataType dtype))                        \
  X(Status, aclDestroyScalar, (const Scalar* scalar))                               \
  X(IntArray*, aclCreateIntArray, (const std::int64_t* values, std::uint64_t size)) \
  X(Status, aclDestroyIntArray, (const IntArray* array))

// Not verified: no header at hand has it.
#define RECSDK_ACLNN_UNVERIFIED(X) X(Status, aclDestroyAclOpExecutor, (OpExecutor * executor))

// X(name, parameters of the first phase but the last two, which are the same of all:
// std::uint64_t* workspace_size, OpExecutor** executor). Not verified.
#define RECSDK_ACLNN_OPERATORS(X)                                                                \
  X(aclnnIndexSelect, const Tensor* self, std::int64_t dim, const Tensor* index, Tensor* out)    \
  X(aclnnInplaceIndexCopy, Tensor* self, std::int64_t dim, const Tensor* index,                  \
    const Tensor* source)                                                                        \
  X(aclnnInplaceAdd, const Tensor* self, const Tensor* other, const Scalar* alpha)               \
  X(aclnnInplaceAdds, const Tensor* self, const Scalar* other, const Scalar* alpha)              \
  X(aclnnInplaceMuls, Tensor* self, const Scalar* other)                                         \
  X(aclnnInplaceAddcmul, const Tensor* self, const Tensor* factor1, const Tensor* factor2,       \
    const Scalar* value)                                                                         \
  X(aclnnInplaceAddcdiv, const Tensor* self, const Tensor* numerator, const Tensor* denominator, \
    const Scalar* value)                                                                         \
  X(aclnnMul, const Tensor* self, const Tensor* other, Tensor* out)                              \
  X(aclnnSqrt, const Tensor* self, Tensor* out)                                                  \
  X(aclnnMean, const Tensor* self, const IntArray* dims, bool keep_dims, DataType dtype,         \
    Tensor* out)
