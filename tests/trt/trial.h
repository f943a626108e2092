// SPDX-License-Identifier: Apache-2.0
// One node: its attributes, its inputs at some sizes, and its outputs beside the definition in double precision.
#ifndef STOF_TESTS_TRT_TRIAL_H_
#define STOF_TESTS_TRT_TRIAL_H_

#include <string>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/trt/harness.h"
#include "tests/trt/place.h"

namespace stof::test {

struct Sizes {
  int64_t B = 1, S = 1, T = 1;
};
// At most those, and T >= S, as an offset asks.
Sizes RandomSizes(Random* random, const Sizes& most);

// Masks by number: none, causal, a window, a table by head and key, one that allows nothing, documents by segment ids,
// lengths, padding in one arm of an `or`.
constexpr int kMasks = 8;
constexpr int kTableMask = 3, kDocuments = 5, kLengths = 6, kPadInOr = 7;
constexpr int64_t kTableHeads = 8, kTableKeys = 96;

struct Case {
  int64_t H = 2, G = 2, D = 16, Dv = 16;
  DType dtype = DType::kF16;
  std::string layouts[4] = {"BHSD", "BHSD", "BHSD", "BHSD"};
  int64_t before[3] = {}, behind[3] = {};  // heads in the tensor of query, key and value that are not theirs
  bool offset = false;
  int mask = 0;
  int pad = -1;  // a type of kPadTypes; -1: none
  bool one_pad = false;
  bool bias = false, sink = false;
  bool lse = false;       // the second output
  bool wide_ids = false;  // int64, else int32
  float softcap = 0;
  EmptyRows empty_rows = EmptyRows::kZero;
  std::vector<uint8_t> table;  // [kTableHeads, kTableKeys] of 0 and 1, for kTableMask
};
constexpr int kPadTypes = 6;
Case RandomCase(Random* random);
std::string Describe(const Case& c);
Attributes AttributesOf(const Case& c, Random* random);

struct Input {
  DataType type;
  std::vector<int64_t> dims;
};
std::vector<Input> InputsOf(const Case& c, const Sizes& n);
std::vector<Input> OutputsOf(const Case& c, const Sizes& n);

// One run: draws inputs and knows the right outputs.
class Trial {
 public:
  Trial(const Case& c, const Sizes& n, uint64_t seed);
  // Other numbers in the same memory; the plugin sees them after the stream has done with what was queued.
  void Draw(uint64_t seed, cudaStream_t stream);
  // What TensorRT does before the first run with a shape; then a run.
  void Shape(nvinfer1::IPluginV3OneRuntime* runtime) const;
  void Enqueue(nvinfer1::IPluginV3OneRuntime* runtime, const Memory& workspace, cudaStream_t stream) const;
  void Poison(cudaStream_t stream) const;  // of the outputs
  void Check(cudaStream_t stream) const;

 private:
  void Fill(int input, int64_t heads, int64_t length, int64_t size, Random* random, std::vector<double>* dense);
  void FillOperands(Random* random, Dense* problem);
  bool Allows(int64_t b, int64_t h, int64_t i, int64_t k) const;
  void CheckLse(size_t row) const;

  const Case case_;
  const Sizes sizes_;
  uint64_t seed_ = 0;
  std::vector<nvinfer1::PluginTensorDesc> in_, out_;
  std::vector<Memory> memory_;
  std::vector<const void*> inputs_;
  std::vector<Memory> outputs_;
  std::vector<uint8_t> padded_;  // [B, T]
  std::vector<int64_t> segments_, lengths_;
  Answer answer_;
  double largest_ = 0;
};

// Asks a plugin what a builder asks; gives the workspace. tactics: the ids that may be set.
size_t Build(const Case& c, const Sizes& most, const Sizes& usual, Held* held, std::vector<int32_t>* tactics = nullptr);

// A plugin as a process gets it that loads an engine file: built, serialized and created again from the bytes.
Held Loaded(const Attributes& attributes);

}  // namespace stof::test
#endif  // STOF_TESTS_TRT_TRIAL_H_
