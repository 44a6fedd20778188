// The host shim has one header.
#pragma once

#include "cuda_runtime.h"
