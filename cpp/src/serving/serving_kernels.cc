#include "serving/serving_kernels.h"

#include "util/isa.h"

namespace recsdk::internal {

const ServingKernels& serving_kernels() {
  switch (current_isa()) {
#if defined(RECSDK_HAVE_AVX2)
    case Isa::kAvx2:
      return kServingKernelsAvx2;
#endif
#if defined(RECSDK_HAVE_AVX512)
    case Isa::kAvx512:
      return kServingKernelsAvx512;
#endif
    default:
      return kServingKernelsBaseline;
  }
}

}  // namespace recsdk::internal
