// SPDX-License-Identifier: Apache-2.0
// Problems of StofGemm and what has to come out, for the CPU's tests and the device's.
#ifndef STOF_TESTS_CPP_GEMM_GEMM_CASES_H_
#define STOF_TESTS_CPP_GEMM_GEMM_CASES_H_

#include <cstring>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/gemm/gemm.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/fixtures.h"

namespace stof::test::gemm {

class Attributes final : public AttributeReader {
 public:
  Attributes(std::string text, int64_t pair) : text_(std::move(text)), pair_(pair) {}
  bool Int(const char* name, int64_t* value) const override {
    if (std::strcmp(name, "pair") != 0) return false;
    *value = pair_;
    return true;
  }
  bool Float(const char*, float*) const override { return false; }
  bool Ints(const char*, std::vector<int64_t>*) const override { return false; }
  bool String(const char* name, std::string* value) const override {
    if (std::strcmp(name, "epilogue") != 0) return false;
    *value = text_;
    return true;
  }

 private:
  std::string text_;
  int64_t pair_;
};

const OpDescription& Description();

// ---- one problem ----
struct Part {
  enum Kind { kNone, kBias0, kBias1, kScale, kRow, kResidual, kKinds };
};

struct Case {
  uint64_t seed = 0;
  DType dtype = DType::kF32;
  int pair = 0;
  std::vector<int64_t> lead = {1};  // dimensions of a but the last
  int64_t N = 1, K = 1;
  Activation activation = Activation::kNone;
  bool has[Part::kKinds] = {};
  bool shifted = false;  // tensors begin two bytes beyond 16-byte boundaries
  int64_t M() const {
    int64_t m = 1;
    for (int64_t d : lead) m *= d;
    return m;
  }
};
std::string Describe(const Case& c);

struct Host {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<char> bytes;
  int64_t Count() const { return static_cast<int64_t>(bytes.size()) / SizeOf(dtype); }
  double At(int64_t i) const { return LoadFloat(dtype, bytes.data() + i * SizeOf(dtype)); }
  Tensor View(void* data) const {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = static_cast<int32_t>(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) tensor.dims[i] = dims[i];
    tensor.data = data;
    return tensor;
  }
};
Host Draw(DType dtype, std::vector<int64_t> dims, double range, Random* random);

struct Problem {
  Case c;
  std::string text;
  std::vector<Host> inputs;
  int place[Part::kKinds] = {};  // the input of each part
};
// The text says the form's parts in an order of its own.
Problem Make(const Case& c);
// One of any kind, with sizes up to `most`, often around multiples of 64.
Case RandomCase(uint64_t seed, DType dtype, int64_t most);
// Whether a case runs: every n-th one alone (STOF_SAMPLE), or one by its seed (STOF_CASE).
bool IsSampled(uint64_t seed);

// Those that are functions of chains, which describe an epilogue.
constexpr Activation kChainActivations[] = {Activation::kNone, Activation::kRelu, Activation::kGelu,
                                            Activation::kGeluTanh, Activation::kSilu};
constexpr size_t kBand = 256;  // bytes around an output that are compared, too
// All elements of a small output; of a large one the last rows and columns, those around tiles' edges, and some.
// function: relative error of the activation.
void Compare(const Problem& p, const std::vector<char>& bytes, size_t begin, double function);

}  // namespace stof::test::gemm
#endif  // STOF_TESTS_CPP_GEMM_GEMM_CASES_H_
