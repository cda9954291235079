// Entry point of libFuzzer:  cmake -S cpp -B build/fuzz -DCMAKE_CXX_COMPILER=clang++
// -DRECSDK_BUILD_FUZZERS=ON
//                            build/fuzz/tests/fuzz/table_fuzzer -max_len=4096 -max_total_time=60
#include <cstddef>
#include <cstdint>

#include "fuzz/table_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_operations(data, size);
  return 0;
}
