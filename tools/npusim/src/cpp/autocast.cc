// What autocast does on the device: torch's own lists of operators, by torch's own casts.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

namespace npusim {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using at::DimnameList;  // named without its namespace there; later ones have it no more
#endif
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

#define NPUSIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define NPUSIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define NPUSIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NPUSIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

/// As torch's devices do: its gradient overflows in 16 bits.
Tensor refuse_binary_cross_entropy(const Tensor& /*input*/, const Tensor& /*target*/,
                                   const std::optional<Tensor>& /*weight*/, int64_t /*reduction*/) {
  TORCH_CHECK(false,
              "binary_cross_entropy is unsafe to autocast; use binary_cross_entropy_with_logits, "
              "or turn autocast off around it");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(NPUSIM_LOWER)
  AT_FORALL_FP32(NPUSIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(NPUSIM_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(NPUSIM_PROMOTE)
  m.impl("binary_cross_entropy", refuse_binary_cross_entropy);
}

}  // namespace
}  // namespace npusim
