// Compiled with -mavx2.
#define RECSDK_XXH3 kXxh3Avx2
#include "checkpoint/xxh3.inc"
