// Initial rows of keys, wherever they are to lie.
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"
#include "recsdk/initializer.h"
#include "recsdk/row_layout.h"
#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {

void initial_weights(const InitializerConfig& initializer, std::uint64_t seed,
                     std::uint64_t table_hash, std::int64_t dim, std::span<const Key> keys,
                     float* values, std::optional<int> max_threads) {
  constexpr std::int64_t kRowGrain = 1024;  // rows a piece of the parallel loop
  initializer.validate();
  if (dim < 1 || dim > kMaxDim) {
    throw std::invalid_argument(
        internal::must("initial_weights: dim", "be 1 to " + std::to_string(kMaxDim), dim));
  }
  if (keys.empty()) return;
  if (initializer.kind == InitializerKind::kCustom) return initializer.callback(keys, values);
  internal::parallel_for(static_cast<std::int64_t>(keys.size()), kRowGrain,
                         max_threads.value_or(num_threads()),
                         [&](std::int64_t begin, std::int64_t end) {
                           internal::kernels().initialize({&initializer,
                                                           seed,
                                                           table_hash,
                                                           dim,
                                                           keys.data() + begin,
                                                           end - begin,
                                                           {},
                                                           DType::kFloat32,
                                                           nullptr,
                                                           values + begin * dim});
                         });
}

}  // namespace recsdk
