# How the libraries' objects come about, once all sources are known.
foreach(library recsdk recsdk_serving)
  if(RECSDK_OBJECTS)
    file(READ ${RECSDK_OBJECTS}/${library}.objects objects)
    set_target_properties(${library} PROPERTIES SOURCES "${objects}" LINKER_LANGUAGE CXX)
  else()
    file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${library}.objects
      CONTENT "$<FILTER:$<TARGET_OBJECTS:${library}>,EXCLUDE,[.]gch$>")
  endif()
endforeach()

# Headers that are read once for all sources, but for those with instructions of their own. Not with a launcher,
# which is a cache of objects: it cannot see what such an object was made from.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER AND NOT RECSDK_OBJECTS)
  target_precompile_headers(recsdk PRIVATE <algorithm> <array> <atomic> <bit> <cmath> <condition_variable> <cstddef>
    <cstdint> <cstring> <deque> <functional> <limits> <memory> <mutex> <numeric> <optional> <span> <stdexcept>
    <string> <string_view> <thread> <utility> <vector>)
  target_precompile_headers(recsdk_serving REUSE_FROM recsdk)
  foreach(library recsdk recsdk_serving)
    get_target_property(sources ${library} SOURCES)
    list(FILTER sources INCLUDE REGEX "(kernels|xxh3)_[a-z0-9]+\\.cc$")
    set_source_files_properties(${sources} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endif()
