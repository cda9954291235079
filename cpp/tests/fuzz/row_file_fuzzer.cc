// Entry point of libFuzzer, over the corpus of row files; see table_fuzzer.cc:
//   build/fuzz/tests/fuzz/row_file_fuzzer -max_total_time=60 NEW_INPUTS
//   cpp/tests/fuzz/corpus/row_file
#include <cstddef>
#include <cstdint>

#include "fuzz/row_file_operations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  recsdk::test::run_row_file(data, size);
  return 0;
}
