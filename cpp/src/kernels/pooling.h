// The divisor of a bag's sum, which pooling and its derivative share.
//
// The functions are static: the kernels compile them for instruction sets that other code must not
// use.
#pragma once

#include <cstdint>

#include "recsdk/types.h"

namespace recsdk::internal {

/// The divisor of the sum of the bag of keys [begin, end): 1 for a sum, the number of keys for a
/// mean, the sum of the weights in bag order for a weighted mean (`weights` null: unweighted). If
/// it is 0 the bag pools to zeros.
static inline float bag_divisor(Pooling pooling, const float* weights, std::int64_t begin,
                                std::int64_t end) {
  if (pooling == Pooling::kSum) return 1.0F;
  if (weights == nullptr) return static_cast<float>(end - begin);
  float sum = 0.0F;
  for (std::int64_t i = begin; i < end; ++i) sum += weights[i];
  return sum;
}

/// The factor by which a bag's gradient reaches the row of a key of weight `weight` (1 if
/// unweighted): GradSource::scale of that key.
static inline float gradient_scale(float weight, float divisor) {
  return divisor == 0.0F ? 0.0F : weight / divisor;
}

}  // namespace recsdk::internal
