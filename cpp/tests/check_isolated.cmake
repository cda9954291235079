# Fails if an object file that is compiled for a wider instruction set defines an inline function or a template
# that the linker could choose for the whole program: other machines would stop on it.
# Usage: cmake -DNM=nm "-DOBJECTS=a.o;b.o" -P check_isolated.cmake
set(num_checked 0)
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "(kernels|xxh3)_avx[0-9]+\\.cc")
    continue()
  endif()
  math(EXPR num_checked "${num_checked} + 1")
  execute_process(COMMAND ${NM} --demangle --defined-only --extern-only ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" lines "${symbols}")
  list(FILTER lines EXCLUDE REGEX " [A-Z] recsdk::internal::k(Kernels|ServingKernels|Xxh3)[A-Za-z0-9]+$")
  # What sanitizers add; none of it is code.
  list(FILTER lines EXCLUDE REGEX " (DW\\.ref\\.|__odr_asan)")
  if(lines)
    message(FATAL_ERROR "${object} shares symbols with other code:\n${symbols}")
  endif()
endforeach()
if(num_checked EQUAL 0)
  message(FATAL_ERROR "no object of a wider instruction set among: ${OBJECTS}")
endif()
