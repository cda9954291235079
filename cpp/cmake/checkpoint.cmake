# Row files: checksums by xxHash's header, nothing of it at run time; compression by zstd where its header
# is there to build with and its library to run with.
set(RECSDK_ZSTD AUTO CACHE STRING "Compression of row files with zstd: AUTO, ON or OFF")
set_property(CACHE RECSDK_ZSTD PROPERTY STRINGS AUTO ON OFF)

find_path(RECSDK_XXHASH_INCLUDE_DIR xxhash.h)
if(NOT RECSDK_XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR "xxhash.h is missing: install libxxhash-dev, or set RECSDK_XXHASH_INCLUDE_DIR to its folder")
endif()
# The checksums are one source too, compiled once per instruction set.
set(RECSDK_CHECKSUM_DIR ${CMAKE_CURRENT_SOURCE_DIR}/src/io)
set(RECSDK_CHECKSUM_SOURCES ${RECSDK_CHECKSUM_DIR}/xxh3_baseline.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND RECSDK_CHECKSUM_SOURCES ${RECSDK_CHECKSUM_DIR}/xxh3_avx2.cc)
  set_source_files_properties(${RECSDK_CHECKSUM_DIR}/xxh3_avx2.cc PROPERTIES COMPILE_OPTIONS "-mavx2")
endif()
target_sources(recsdk PRIVATE ${RECSDK_CHECKSUM_SOURCES})
set_property(SOURCE ${RECSDK_CHECKSUM_SOURCES} APPEND PROPERTY COMPILE_OPTIONS "-O3")
set_source_files_properties(${RECSDK_CHECKSUM_DIR}/checksum.cc ${RECSDK_CHECKSUM_SOURCES} PROPERTIES
  INCLUDE_DIRECTORIES ${RECSDK_XXHASH_INCLUDE_DIR})

if(RECSDK_ZSTD)
  find_path(RECSDK_ZSTD_INCLUDE_DIR zstd.h)
  if(RECSDK_ZSTD_INCLUDE_DIR)
    # Only the header: the library is looked for when it is first used.
    set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/src/io/codec.cc PROPERTIES
      INCLUDE_DIRECTORIES ${RECSDK_ZSTD_INCLUDE_DIR} COMPILE_DEFINITIONS RECSDK_HAVE_ZSTD)
  elseif(NOT RECSDK_ZSTD STREQUAL AUTO)
    message(FATAL_ERROR "zstd.h is missing: install libzstd-dev, or configure with -DRECSDK_ZSTD=OFF")
  endif()
endif()
