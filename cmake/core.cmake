# pipecomm_core: all of csrc that needs neither torch nor CUDA. The module and the C++ tests link the same objects.
set(csrc "${CMAKE_CURRENT_LIST_DIR}/../csrc")
file(GLOB_RECURSE core_sources CONFIGURE_DEPENDS ${csrc}/*.cpp)
list(FILTER core_sources EXCLUDE REGEX "(/bindings/.*|_cuda\\.cpp|_nccl\\.cpp)$")
add_library(pipecomm_core STATIC ${core_sources})
target_include_directories(pipecomm_core PUBLIC ${csrc})
target_link_libraries(pipecomm_core PUBLIC Threads::Threads)
