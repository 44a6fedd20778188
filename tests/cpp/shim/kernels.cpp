// The kernels for programs on the shim.
#include "copy/copy_cuda.cu"
#include "copy/mean_cuda.cu"
