# Installs the libraries, their headers, and for each a CMake package (find_package(recsdk), find_package(
# recsdk_serving)) and a pkg-config file. All of it can be moved to another place afterwards.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/recsdk DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
# From the folder of pkg-config's files to the prefix.
file(RELATIVE_PATH RECSDK_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})

function(recsdk_install library)
  set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/${library})
  # Users need C++20 for the headers.
  target_compile_features(${library} PUBLIC cxx_std_20)
  install(TARGETS ${library} EXPORT ${library}Targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT ${library}Targets NAMESPACE recsdk:: DESTINATION ${folder})
  # find_package finds the build folder too, given as recsdk_DIR or recsdk_serving_DIR.
  export(EXPORT ${library}Targets NAMESPACE recsdk:: FILE ${CMAKE_CURRENT_BINARY_DIR}/${library}Targets.cmake)
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/${library}Config.cmake.in
    ${CMAKE_CURRENT_BINARY_DIR}/${library}Config.cmake INSTALL_DESTINATION ${folder})
  # While the version is 0.x, every minor release may break its users.
  write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/${library}ConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${library}Config.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/${library}ConfigVersion.cmake DESTINATION ${folder})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/${library}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${library}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${library}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()

recsdk_install(recsdk)
recsdk_install(recsdk_serving)
