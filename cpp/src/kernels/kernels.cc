#include "kernels/kernels.h"

#include <array>

#include "util/isa.h"

namespace recsdk::internal {
namespace {

constexpr std::array<const Kernels*, kNumIsas> kTables = {
    &kKernelsBaseline,
#if defined(RECSDK_HAVE_AVX2)
    &kKernelsAvx2,
#else
    nullptr,  // never chosen
#endif
#if defined(RECSDK_HAVE_AVX512)
    &kKernelsAvx512,
#else
    nullptr,
#endif
};

}  // namespace

const Kernels& kernels() { return *kTables[static_cast<std::size_t>(current_isa())]; }

}  // namespace recsdk::internal
