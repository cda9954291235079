# librecsdk_serving: what reads frozen tables, and nothing of what trains. Of the rest it shares the choice of an
# instruction set, checksums, and how a row is stored.
set(RECSDK_SERVING_DIR ${CMAKE_CURRENT_SOURCE_DIR}/src/serving)
set(RECSDK_SERVING_SOURCES ${RECSDK_SERVING_DIR}/c_api.cc ${RECSDK_SERVING_DIR}/find.cc
  ${RECSDK_SERVING_DIR}/frozen_file.cc ${RECSDK_SERVING_DIR}/layer.cc ${RECSDK_SERVING_DIR}/readers.cc
  ${RECSDK_SERVING_DIR}/serving_delta.cc ${RECSDK_SERVING_DIR}/serving_kernels.cc
  ${RECSDK_SERVING_DIR}/serving_table.cc ${RECSDK_SERVING_DIR}/versions.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/freeze/quantize.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/freeze/shared_image.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/util/apart.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/util/isa.cc)
add_library(recsdk_serving ${RECSDK_SERVING_SOURCES} ${RECSDK_SERVING_DIR}/serving_kernels_baseline.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/io/checksum.cc ${RECSDK_CHECKSUM_SOURCES})
add_library(recsdk::serving ALIAS recsdk_serving)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(recsdk_serving PRIVATE ${RECSDK_SERVING_DIR}/serving_kernels_avx2.cc
    ${RECSDK_SERVING_DIR}/serving_kernels_avx512.cc)
  target_compile_options(recsdk_serving PRIVATE -march=x86-64-v2)
  set_source_files_properties(${RECSDK_SERVING_DIR}/serving_kernels_avx2.cc PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mf16c;-mfma")
  set_source_files_properties(${RECSDK_SERVING_DIR}/serving_kernels_avx512.cc PROPERTIES
    COMPILE_OPTIONS "-mf16c;-mfma;-mavx512f;-mavx512dq;-mavx512vl;-mavx512bw;-mprefer-vector-width=512")
  target_compile_definitions(recsdk_serving PRIVATE RECSDK_HAVE_AVX2 RECSDK_HAVE_AVX512)
endif()
set_property(SOURCE ${RECSDK_SERVING_DIR}/serving_kernels_baseline.cc ${RECSDK_SERVING_DIR}/serving_kernels_avx2.cc
  ${RECSDK_SERVING_DIR}/serving_kernels_avx512.cc APPEND PROPERTY COMPILE_OPTIONS "-O3;-Wno-psabi;-fno-math-errno")
target_include_directories(recsdk_serving
  PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
  PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src)
target_compile_definitions(recsdk_serving PRIVATE RECSDK_VERSION_STRING="${PROJECT_VERSION}")
set_target_properties(recsdk_serving PROPERTIES EXPORT_NAME serving DEFINE_SYMBOL "" VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
recsdk_set_warnings(recsdk_serving)
