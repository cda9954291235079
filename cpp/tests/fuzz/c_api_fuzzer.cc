// Entry point of libFuzzer for the C interface; see table_fuzzer.cc.
#include <cstddef>
#include <cstdint>

#include "fuzz/c_api_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_c_api(data, size);
  return 0;
}
