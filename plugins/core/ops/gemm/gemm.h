// SPDX-License-Identifier: Apache-2.0
// StofGemm: docs/reference/gemm-format.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_GEMM_GEMM_H_
#define STOF_PLUGINS_CORE_OPS_GEMM_GEMM_H_

#include "plugins/core/contract/op.h"

namespace stof {

const OpDescription* GemmDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_GEMM_GEMM_H_
