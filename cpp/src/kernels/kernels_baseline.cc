// The kernels in 16-byte registers: SSE4.2 on x86-64, NEON on aarch64.
#define RECSDK_KERNELS kKernelsBaseline
#define RECSDK_ISA_NAME "baseline"
#define RECSDK_VECTOR_FLOATS 4
#define RECSDK_TILE_VECTORS 8
#include "kernels/kernels.inc"
