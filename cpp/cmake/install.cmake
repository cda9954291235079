# Installs the library, its headers, a CMake package (find_package(recsdk)) and a pkg-config file.
# All of it can be moved to another place afterwards.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(RECSDK_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/recsdk)

# Users need C++20 for the headers.
target_compile_features(recsdk PUBLIC cxx_std_20)

install(TARGETS recsdk EXPORT recsdkTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/recsdk DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(EXPORT recsdkTargets NAMESPACE recsdk:: DESTINATION ${RECSDK_PACKAGE_DIR})
# find_package(recsdk) finds the build folder too, given as recsdk_DIR.
export(EXPORT recsdkTargets NAMESPACE recsdk:: FILE ${CMAKE_CURRENT_BINARY_DIR}/recsdkTargets.cmake)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/recsdkConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/recsdkConfig.cmake INSTALL_DESTINATION ${RECSDK_PACKAGE_DIR})
# While the version is 0.x, every minor release may break its users.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/recsdkConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/recsdkConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/recsdkConfigVersion.cmake DESTINATION ${RECSDK_PACKAGE_DIR})

# From the folder of recsdk.pc to the prefix.
file(RELATIVE_PATH RECSDK_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${CMAKE_CURRENT_LIST_DIR}/recsdk.pc.in ${CMAKE_CURRENT_BINARY_DIR}/recsdk.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/recsdk.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
