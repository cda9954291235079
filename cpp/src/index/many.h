// Calls over many indexes or tables at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/runtime.h"
#include "util/thread_pool.h"

namespace recsdk::internal {

/// Throws std::invalid_argument if a part of the calls has none, or two have the same: they would
/// wait for each other, or take turns in any order. `member` gives the one of a call.
template <typename Call, typename Member, typename Title>
void check_distinct(std::span<const Call> calls, const Member& member, const Title& title) {
  std::vector<decltype(member(calls[0]))> all;
  all.reserve(calls.size());
  for (const Call& call : calls) {
    if (member(call) == nullptr)
      throw std::invalid_argument("a part of a call over many has no table or index; set it");
    all.push_back(member(call));
  }
  std::sort(all.begin(), all.end());
  const auto twice = std::adjacent_find(all.begin(), all.end());
  if (twice == all.end()) return;
  throw std::invalid_argument(title(**twice) +
                              " occurs twice in a call over many; put its parts together");
}

/// Runs all calls on the threads of the pool; throws the first error after the others have ended.
template <typename Call, typename Run>
void run_all(std::span<const Call> calls, const Run& run) {
  std::vector<std::exception_ptr> errors(calls.size());
  parallel_for(static_cast<std::int64_t>(calls.size()), 1, num_threads(),
               [&](std::int64_t begin, std::int64_t end) {
                 for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end);
                      ++i) {
                   try {
                     run(calls[i]);
                   } catch (...) {
                     errors[i] = std::current_exception();
                   }
                 }
               });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace recsdk::internal
