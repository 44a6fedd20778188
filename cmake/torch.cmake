# Facts of the torch that Python_EXECUTABLE imports: version, headers, libraries.
#
# Not find_package(Torch): that runs its own CUDA search, which fails with partial toolkits and for CPU builds
# against a CUDA wheel. Its include directories hold the only pybind11 we may use: another version imports well
# and then rejects every ProcessGroup argument, so they must come before any other directory.
execute_process(COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/query_torch.py"
  OUTPUT_VARIABLE torch_facts RESULT_VARIABLE torch_status ERROR_VARIABLE torch_error)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch. Install it (pip install torch), then build with "
    "pip install --no-build-isolation .\n${torch_error}")
endif()
string(JSON TORCH_VERSION GET "${torch_facts}" version)
string(JSON TORCH_CUDA_VERSION GET "${torch_facts}" cuda)
string(JSON TORCH_CXX11_ABI GET "${torch_facts}" cxx11_abi)
string(JSON TORCH_INCLUDE_DIRS GET "${torch_facts}" include_dirs)
string(JSON TORCH_LIBRARY_DIRS GET "${torch_facts}" library_dirs)
string(JSON WHEEL_CUDA_INCLUDE_DIRS GET "${torch_facts}" wheel_cuda_include_dirs)
string(JSON WHEEL_NCCL_INCLUDE_DIRS GET "${torch_facts}" wheel_nccl_include_dirs)
