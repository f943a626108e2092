// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/contract/cuda_backend.h"

namespace stof {

const CudaBackend* FindCudaBackend() { return nullptr; }

}  // namespace stof
