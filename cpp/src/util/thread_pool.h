// One pool of threads per process, shared by all tables.
#pragma once

#include <cstdint>
#include <type_traits>

namespace recsdk::internal {

/// Refers to something callable as body(begin, end) while one call lasts. Allocates nothing.
class RangeBody {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, RangeBody>)
  RangeBody(F&& body)  // NOLINT(google-explicit-constructor): a lambda is passed as it is
      : object_(&body), call_([](const void* object, std::int64_t begin, std::int64_t end) {
          (*static_cast<const std::remove_cvref_t<F>*>(object))(begin, end);
        }) {}

  void operator()(std::int64_t begin, std::int64_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void*, std::int64_t, std::int64_t);
};

/// Calls body(begin, end) on pieces that cover [0, count), each of at most `grain` numbers, on up
/// to `max_threads` threads, the caller's among them. Pieces are claimed one by one, so a slow core
/// does not hold up the rest. Returns when all are done; rethrows the first exception of a body
/// (pieces not yet begun are then left out). Throws nothing of its own: if no threads can be made,
/// the caller does the work alone. Callable from anywhere, also from within a body.
void parallel_for(std::int64_t count, std::int64_t grain, int max_threads, RangeBody body);

/// Prepares the pool for fork now, not at its first use.
void prepare_pool_for_fork();

}  // namespace recsdk::internal
