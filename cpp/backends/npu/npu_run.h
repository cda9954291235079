// How an operator of aclnn is run: its size of workspace and executor first, then its launch.
//
// Source: "two-phase API" in the documentation of the operator acceleration library.
#pragma once

#include <memory>

#include "backends/npu/npu_stream.h"

namespace recsdk::internal {

template <typename Operator, typename... Args>
void NpuStream::run(const Operator& op, Args... args) {
  std::uint64_t bytes = 0;
  acl::OpExecutor* made = nullptr;
  library_.check(op.get_workspace_size(args..., &bytes, &made), op.name);
  // The launch takes it, however it ends; before that it is ours to destroy.
  std::unique_ptr<acl::OpExecutor, acl::Status (*)(acl::OpExecutor*)> executor(
      made, library_.aclDestroyAclOpExecutor);
  void* const memory = workspace(bytes);
  library_.check(op.launch(memory, bytes, executor.release(), stream_), op.name);
}

}  // namespace recsdk::internal
