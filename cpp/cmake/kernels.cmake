# The kernels are one source, compiled once per instruction set.
set(RECSDK_KERNEL_DIR ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels)
target_sources(recsdk PRIVATE ${RECSDK_KERNEL_DIR}/kernels_baseline.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(recsdk PRIVATE ${RECSDK_KERNEL_DIR}/kernels_avx2.cc ${RECSDK_KERNEL_DIR}/kernels_avx512.cc)
  # The baseline of the whole library is x86-64-v2, which every 64-bit x86 server of the last decade runs.
  target_compile_options(recsdk PRIVATE -march=x86-64-v2)
  set_source_files_properties(${RECSDK_KERNEL_DIR}/kernels_avx2.cc PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
  set_source_files_properties(${RECSDK_KERNEL_DIR}/kernels_avx512.cc PROPERTIES
    COMPILE_OPTIONS "-mf16c;-mavx512f;-mavx512dq;-mavx512vl;-mavx512bw;-mprefer-vector-width=512")
  target_compile_definitions(recsdk PRIVATE RECSDK_HAVE_AVX2 RECSDK_HAVE_AVX512)
endif()
# All kernels rely on vector extensions wider than the baseline's registers; no vector crosses a call.
set_property(SOURCE ${RECSDK_KERNEL_DIR}/kernels_baseline.cc ${RECSDK_KERNEL_DIR}/kernels_avx2.cc
  ${RECSDK_KERNEL_DIR}/kernels_avx512.cc APPEND PROPERTY COMPILE_OPTIONS "-O3;-Wno-psabi;-fno-math-errno")
