#include "backends/npu/acl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "recsdk/error.h"

namespace recsdk::internal::acl {
namespace {

constexpr const char* kRuntime = "libascendcl.so";
// Descriptors lie in libnnopbase.so; the operators in libopapi.so, which later releases divide.
constexpr const char* kOperators[] = {"libnnopbase.so", "libopapi.so", "libopapi_math.so",
                                      "libopapi_nn.so"};

[[noreturn, gnu::cold]] void unavailable(const std::string& what) {
  throw Error(ErrorCode::kBackendUnavailable,
              "backend 'npu' is not available: " + what +
                  "; install Ascend's driver, the CANN toolkit and its operator package for your "
                  "NPU (8.0 or later), and source their set_env.sh before the program starts");
}

void* open(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_LOCAL); }

std::string last_error() {
  const char* const message = dlerror();
  return message == nullptr ? "no reason given" : message;
}

std::vector<void*> open_all() {
  const char* const named = std::getenv("RECSDK_ACL_LIBRARY");
  const bool has_name = named != nullptr && *named != '\0';
  void* const runtime = open(has_name ? named : kRuntime);
  if (runtime == nullptr) unavailable(last_error());
  std::vector<void*> opened{runtime};
  if (has_name) return opened;
  for (const char* const name : kOperators) {
    void* const found = open(name);
    if (found != nullptr) opened.push_back(found);
  }
  return opened;
}

template <typename Function>
void find(const std::vector<void*>& opened, const std::string& name, Function& function) {
  for (void* const handle : opened) {
    function = reinterpret_cast<Function>(dlsym(handle, name.c_str()));
    if (function != nullptr) return;
  }
  unavailable("none of its libraries has " + name);
}

template <typename Operator>
void find_operator(const std::vector<void*>& opened, const char* name, Operator& found) {
  found.name = name;
  find(opened, std::string(name) + "GetWorkspaceSize", found.get_workspace_size);
  find(opened, name, found.launch);
}

// One that is not whole stays loaded as well: Ascend's libraries start threads.
std::unique_ptr<const Library> load() {
  const std::vector<void*> opened = open_all();
  auto loaded = std::make_unique<Library>();
#define RECSDK_FIND(result, name, parameters) find(opened, #name, loaded->name);
  RECSDK_ACL_FUNCTIONS(RECSDK_FIND)
  RECSDK_ACLNN_DESCRIPTORS(RECSDK_FIND)
  RECSDK_ACLNN_UNVERIFIED(RECSDK_FIND)
#undef RECSDK_FIND
#define RECSDK_FIND(name, ...) find_operator(opened, #name, loaded->name);
  RECSDK_ACLNN_OPERATORS(RECSDK_FIND)
#undef RECSDK_FIND
  return loaded;
}

bool is_out_of_memory(Status status) {
  return status == kBadAlloc || status == kStorageOverLimit || status == kRtMemoryAllocation;
}

}  // namespace

void Library::fail(Status status, const char* call) const {
  const char* const reason = aclGetRecentErrMsg();
  std::string message =
      std::string(call) + " of Ascend's runtime returned " + std::to_string(status);
  if (reason != nullptr && *reason != '\0') message += ": " + std::string(reason);
  if (is_out_of_memory(status)) {
    throw Error(ErrorCode::kOutOfMemory, message + "; lower max_device_rows or the batch");
  }
  throw Error(ErrorCode::kDevice,
              message + "; see the runtime's logs and the state of the device (npu-smi info)");
}

void Library::fail_without_descriptor(const char* call) const {
  throw Error(ErrorCode::kOutOfMemory, std::string(call) + " of Ascend's runtime gave no " +
                                           "descriptor; the host has too little memory");
}

const Library& library() {
  static std::mutex mutex;
  static std::unique_ptr<const Library> loaded;
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = load();
  return *loaded;
}

}  // namespace recsdk::internal::acl
