// SPDX-License-Identifier: Apache-2.0
// In place of the header of the CUDA toolkit.
#pragma once
#include <cuda_runtime.h>
