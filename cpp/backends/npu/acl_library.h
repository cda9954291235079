// Ascend's libraries, loaded when they are first needed.
#pragma once

#include <memory>

#include "backends/npu/acl_api.h"

namespace recsdk::internal::acl {

/// Both phases of an operator.
template <typename... Args>
struct Operator {
  const char* name = nullptr;
  Status (*get_workspace_size)(Args..., std::uint64_t* workspace_size,
                               OpExecutor** executor) = nullptr;
  Launch launch = nullptr;
};

/// The functions, under their own names.
struct Library {
#define RECSDK_DECLARE(result, name, parameters) result(*name) parameters = nullptr;
  RECSDK_ACL_FUNCTIONS(RECSDK_DECLARE)
  RECSDK_ACLNN_DESCRIPTORS(RECSDK_DECLARE)
  RECSDK_ACLNN_UNVERIFIED(RECSDK_DECLARE)
#undef RECSDK_DECLARE

  // Signatures of operators, from lists of parameters.
  template <typename Signature>
  struct OperatorOf;
  template <typename... Args>
  struct OperatorOf<void(Args...)> {
    using Type = Operator<Args...>;
  };
#define RECSDK_DECLARE(name, ...) OperatorOf<void(__VA_ARGS__)>::Type name;
  RECSDK_ACLNN_OPERATORS(RECSDK_DECLARE)
#undef RECSDK_DECLARE

  /// Throws Error(kOutOfMemory) or Error(kDevice), with what the runtime says, unless it is
  /// kSuccess that `call` returned.
  void check(Status status, const char* call) const {
    if (status != kSuccess) fail(status, call);
  }
  [[noreturn]] void fail(Status status, const char* call) const;
  /// The descriptor that `call` gave; throws Error(kOutOfMemory) if that is none.
  template <typename T>
  T* check(T* descriptor, const char* call) const {
    if (descriptor == nullptr) fail_without_descriptor(call);
    return descriptor;
  }
  [[noreturn]] void fail_without_descriptor(const char* call) const;
};

/// Loads the libraries, once; they stay. Throws Error(kBackendUnavailable), saying what to
/// install. RECSDK_ACL_LIBRARY names one library to take everything from instead.
const Library& library();

}  // namespace recsdk::internal::acl
