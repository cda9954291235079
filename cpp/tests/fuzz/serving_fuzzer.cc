// Entry point of libFuzzer for the C interface of serving; see table_fuzzer.cc.
#include <cstddef>
#include <cstdint>

#include "fuzz/serving_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_serving(data, size);
  return 0;
}
