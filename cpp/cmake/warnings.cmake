# Warnings, sanitizers and what keeps arithmetic bit-equal, for every target of ours.
# Off unless asked for: a compiler that we have not seen may warn of something, and a user could not mend it.
option(RECSDK_WERROR "Treat warnings as errors" OFF)

function(recsdk_set_warnings target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wdouble-promotion
    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Wold-style-cast -Woverloaded-virtual>
    $<$<BOOL:${RECSDK_WERROR}>:-Werror>
    # No fused multiply-add by the compiler's choice: it would make results depend on the instruction set.
    -ffp-contract=off)
  if(RECSDK_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${RECSDK_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all -g)
    target_link_options(${target} PUBLIC -fsanitize=${RECSDK_SANITIZE})
  endif()
endfunction()
