// Entry point of libFuzzer for cuts; see table_fuzzer.cc.
#include <cstddef>
#include <cstdint>

#include "fuzz/cut_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_cut_operations(data, size);
  return 0;
}
