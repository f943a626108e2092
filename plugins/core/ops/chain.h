// SPDX-License-Identifier: Apache-2.0
// StofChain: docs/reference/chain-format.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_CHAIN_H_
#define STOF_PLUGINS_CORE_OPS_CHAIN_H_

#include "plugins/core/contract/op.h"

namespace stof {

const OpDescription* ChainDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CHAIN_H_
