// The kernels in 32-byte registers. Compiled with AVX2 and F16C.
#define RECSDK_KERNELS kKernelsAvx2
#define RECSDK_ISA_NAME "avx2"
#define RECSDK_VECTOR_FLOATS 8
#define RECSDK_TILE_VECTORS 8
#include "kernels/kernels.inc"
