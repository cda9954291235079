# Headers that are read once for many sources: a fifth of the time that a build takes. Only where tests are built,
# so a release shows what a source forgets to include. Not with a launcher, which is a cache of objects: it cannot
# see what such an object was made from.
set(RECSDK_READ_ONCE OFF)
if(RECSDK_BUILD_TESTS AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(RECSDK_READ_ONCE ON)
endif()

if(RECSDK_READ_ONCE)
  target_precompile_headers(recsdk PRIVATE <algorithm> <array> <atomic> <bit> <condition_variable> <cstdint> <cstring>
    <exception> <functional> <memory> <mutex> <new> <optional> <shared_mutex> <span> <stdexcept> <string> <thread>
    <utility> <vector>)
  # These are compiled for instruction sets of their own.
  file(GLOB RECSDK_OWN_FLAGS ${CMAKE_CURRENT_SOURCE_DIR}/src/*/kernels_*.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/*/xxh3_*.cc)
  set_source_files_properties(${RECSDK_OWN_FLAGS} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()
