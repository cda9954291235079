// Compiled with -mavx2.
#define RECSDK_XXH3 kXxh3Avx2
#include "io/xxh3.inc"
