// The loops in 32-byte registers. Compiled with AVX2, FMA and F16C.
#define RECSDK_SERVING_KERNELS kServingKernelsAvx2
#define RECSDK_VECTOR_FLOATS 8
#define RECSDK_TILE_VECTORS 8
#include "serving/serving_kernels.inc"
