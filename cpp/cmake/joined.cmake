# The sources of a room are compiled as one: what they include takes as long to compile as they do. A room's names are
# then one program's, so no two sources of it have a local name in common. Apart stay rooms whose loops are tuned by
# themselves, and sources with options of their own.
set(RECSDK_JOINED admission c_api checkpoint cut device eviction freeze index io rows serving table util)
if(RECSDK_ONLY_ROOMS)
  list(APPEND RECSDK_JOINED bags keymap) # only for tests, which ask for no speed
endif()
foreach(room ${RECSDK_JOINED})
  foreach(source ${RECSDK_SOURCES} ${RECSDK_SERVING_SOURCES})
    if(source MATCHES "/src/${room}/")
      set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${room})
    endif()
  endforeach()
endforeach()
# Apart stay also sources of both libraries: a program that links both archives, in any order, takes each once.
set_property(SOURCE ${RECSDK_SERVING_DIR}/find.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/eviction/evictor.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/bags/routing.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/freeze/quantize.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/freeze/shared_image.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/util/apart.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/src/util/isa.cc
  PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
set_target_properties(recsdk recsdk_serving PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
