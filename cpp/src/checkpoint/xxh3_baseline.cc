#define RECSDK_XXH3 kXxh3Baseline
#include "checkpoint/xxh3.inc"
