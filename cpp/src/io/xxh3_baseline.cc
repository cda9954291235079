#define RECSDK_XXH3 kXxh3Baseline
#include "io/xxh3.inc"
