// The loops in 16-byte registers, which every machine of the baseline has.
#define RECSDK_SERVING_KERNELS kServingKernelsBaseline
#define RECSDK_VECTOR_FLOATS 4
#define RECSDK_TILE_VECTORS 8
#include "serving/serving_kernels.inc"
