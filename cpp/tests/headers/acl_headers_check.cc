// Our declarations of Ascend's runtime beside its own, see tools/check_acl_headers.py. It compiles
// if they agree; nothing of it runs.
#include <type_traits>

#include "acl/acl.h"
#include "aclnn_function_types.h"
#include "backends/npu/acl_api.h"

namespace {

namespace ours = recsdk::internal::acl;

// A type of ours as the headers have it: enumerations and descriptors have types of their own
// there. Pointers are translated by what they point to.
template <typename T>
struct Theirs {
  using Type = T;
};
template <typename T>
struct Theirs<const T> {
  using Type = const typename Theirs<T>::Type;
};
template <typename T>
struct Theirs<T*> {
  using Type = typename Theirs<T>::Type*;
};
template <typename Result, typename... Args>
struct Theirs<Result(Args...)> {
  using Type = typename Theirs<Result>::Type(typename Theirs<Args>::Type...);
};

#define RECSDK_TRANSLATE(mine, their) \
  template <>                         \
  struct Theirs<mine> {               \
    using Type = their;               \
  }
RECSDK_TRANSLATE(ours::MemMallocPolicy, aclrtMemMallocPolicy);
RECSDK_TRANSLATE(ours::MemcpyKind, aclrtMemcpyKind);
RECSDK_TRANSLATE(ours::DataType, aclDataType);
RECSDK_TRANSLATE(ours::Format, aclFormat);
RECSDK_TRANSLATE(ours::Tensor, aclTensor);
RECSDK_TRANSLATE(ours::Scalar, aclScalar);
RECSDK_TRANSLATE(ours::IntArray, aclIntArray);
#undef RECSDK_TRANSLATE

template <typename Mine, typename Their>
constexpr bool kAgree = std::is_same_v<typename Theirs<Mine>::Type, Their>;

// Names of types as acl_api.h's lists use them.
using ours::Context;
using ours::DataType;
using ours::Event;
using ours::Format;
using ours::IntArray;
using ours::MemcpyKind;
using ours::MemMallocPolicy;
using ours::Scalar;
using ours::Status;
using ours::Stream;
using ours::Tensor;

#define RECSDK_COMPARE(result, name, parameters) \
  static_assert(kAgree<result parameters, std::remove_pointer_t<decltype(&::name)>>, #name);
RECSDK_ACL_FUNCTIONS(RECSDK_COMPARE)
#undef RECSDK_COMPARE

#define RECSDK_COMPARE(result, name, parameters) \
  static_assert(kAgree<result parameters, std::remove_pointer_t<::_##name>>, #name);
RECSDK_ACLNN_DESCRIPTORS(RECSDK_COMPARE)
#undef RECSDK_COMPARE

static_assert(std::is_same_v<Status, aclError>);
static_assert(std::is_same_v<Context, aclrtContext>);
static_assert(std::is_same_v<Stream, aclrtStream>);
static_assert(std::is_same_v<Event, aclrtEvent>);
static_assert(sizeof(MemMallocPolicy) == sizeof(aclrtMemMallocPolicy));
static_assert(sizeof(MemcpyKind) == sizeof(aclrtMemcpyKind));
static_assert(sizeof(DataType) == sizeof(aclDataType));
static_assert(sizeof(Format) == sizeof(aclFormat));

static_assert(ours::kSuccess == ACL_SUCCESS);
static_assert(ours::kRepeatInitialize == ACL_ERROR_REPEAT_INITIALIZE);
static_assert(ours::kBadAlloc == ACL_ERROR_BAD_ALLOC);
static_assert(ours::kStorageOverLimit == ACL_ERROR_STORAGE_OVER_LIMIT);
static_assert(ours::kRtMemoryAllocation == ACL_ERROR_RT_MEMORY_ALLOCATION);
static_assert(ours::kEventSync == ACL_EVENT_SYNC);
static_assert(static_cast<int>(MemMallocPolicy::kHugeFirst) == ACL_MEM_MALLOC_HUGE_FIRST);
static_assert(static_cast<int>(MemcpyKind::kHostToDevice) == ACL_MEMCPY_HOST_TO_DEVICE);
static_assert(static_cast<int>(MemcpyKind::kDeviceToHost) == ACL_MEMCPY_DEVICE_TO_HOST);
static_assert(static_cast<int>(DataType::kFloat) == ACL_FLOAT);
static_assert(static_cast<int>(DataType::kInt64) == ACL_INT64);
static_assert(static_cast<int>(Format::kNd) == ACL_FORMAT_ND);

}  // namespace
