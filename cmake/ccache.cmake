# Compiles through ccache where it is installed and works: it ends with an error where it may not write its cache.
find_program(CCACHE ccache)
if(CCACHE)
  set(probe "${CMAKE_BINARY_DIR}/ccache_probe.cpp")
  file(WRITE "${probe}" "")
  execute_process(COMMAND "${CCACHE}" "${CMAKE_CXX_COMPILER}" -c "${probe}" -o "${probe}.o"
    RESULT_VARIABLE ccache_status OUTPUT_QUIET ERROR_VARIABLE ccache_error)
  if(ccache_status EQUAL 0)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE}")
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
  else()
    message(STATUS "ccache is not used: ${ccache_error}")
  endif()
endif()
