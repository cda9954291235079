// The kernels in 64-byte registers. Compiled with AVX-512 F, DQ, VL and BW, and F16C.
#define RECSDK_KERNELS kKernelsAvx512
#define RECSDK_ISA_NAME "avx512"
#define RECSDK_VECTOR_FLOATS 16
#define RECSDK_TILE_VECTORS 16
#include "kernels/kernels.inc"
