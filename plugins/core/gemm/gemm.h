// SPDX-License-Identifier: Apache-2.0
// Epilogues of GEMMs: docs/reference/gemm-format.md is the contract.
#ifndef STOF_PLUGINS_CORE_GEMM_GEMM_H_
#define STOF_PLUGINS_CORE_GEMM_GEMM_H_

#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/base/activation.h"
#include "plugins/core/base/status.h"
#include "plugins/core/chain/chain.h"

namespace stof {

enum class GemmPair : int32_t { kNone = 0, kHalves = 1, kTwo = 2 };

// act(p0 + bias0) [* (p1 + bias1)] * scale * row + residual. Inputs by their number in the description, -1: absent.
struct GemmForm {
  Activation activation = Activation::kNone;
  int bias0 = -1, bias1 = -1;  // [n]
  int scale = -1;              // [n]
  int row = -1;                // [m]
  int residual = -1;           // [m, n]
  bool swapped = false;        // p0 of this form is the description's x1

  std::string Text(bool pair) const;
};

// How the description reads an input: as an operand of the GEMM, [m, n], [n], [m] or [].
enum class GemmRead : uint8_t { kUnused, kProduct, kMatrix, kColumns, kRows, kScalar };

struct GemmEpilogue {
  GemmPair pair = GemmPair::kNone;
  Chain chain;
  std::vector<GemmRead> reads;  // of x0, x1, ...
  bool has_form = false;
  GemmForm form;
  std::string why_not;  // where there is no form

  int products() const { return pair == GemmPair::kNone ? 1 : 2; }
  int weights() const { return pair == GemmPair::kTwo ? 2 : 1; }
  // The node's input that the description calls x`number`; number >= products().
  int InputOf(int number) const { return number - products() + 1 + weights(); }
};

// Errors name the line, what was found and what was expected.
Status ParseGemm(std::string_view text, int64_t pair, GemmEpilogue* epilogue);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_GEMM_GEMM_H_
