// SPDX-License-Identifier: Apache-2.0
// CUDA source to machine code by NVRTC, which is looked for when it is first needed: nothing is linked.
#ifndef STOF_CUDA_CHAIN_NVRTC_H_
#define STOF_CUDA_CHAIN_NVRTC_H_

#include <string>

#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

// "13.0" of the NVRTC found; empty: there is none, and *why says where it was looked for.
std::string NvrtcVersion(std::string* why);
// capability: 90 for 9.0. *code: a cubin, or PTX, ended by a NUL, for a device newer than NVRTC.
Status CompileCuda(const std::string& source, int capability, std::string* code);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_NVRTC_H_
