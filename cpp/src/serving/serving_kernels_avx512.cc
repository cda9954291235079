// The loops in 64-byte registers. Compiled with AVX-512 F, DQ, VL and BW, FMA and F16C.
#define RECSDK_SERVING_KERNELS kServingKernelsAvx512
#define RECSDK_VECTOR_FLOATS 16
#define RECSDK_TILE_VECTORS 8
#include "serving/serving_kernels.inc"
