// Entry point of libFuzzer for frozen files; see table_fuzzer.cc.
#include <cstddef>
#include <cstdint>

#include "fuzz/frozen_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_frozen(data, size);
  return 0;
}
