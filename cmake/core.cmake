# pipecomm_core: all of csrc that needs neither Python nor CUDA. The module and the C++ tests link the same objects.
set(csrc "${CMAKE_CURRENT_LIST_DIR}/../csrc")
file(GLOB_RECURSE core_sources CONFIGURE_DEPENDS ${csrc}/*.cpp)
list(FILTER core_sources EXCLUDE REGEX "(/bindings/.*|_cuda\\.cpp)$")
add_library(pipecomm_core STATIC ${core_sources})
target_include_directories(pipecomm_core PUBLIC ${csrc})
target_link_libraries(pipecomm_core PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
# Ten files at a time take a third of the time, in which most goes into the headers of the standard library.
option(PIPECOMM_UNITY "Compile several files as one" ON)
set_target_properties(pipecomm_core PROPERTIES UNITY_BUILD ${PIPECOMM_UNITY} UNITY_BUILD_BATCH_SIZE 10)
