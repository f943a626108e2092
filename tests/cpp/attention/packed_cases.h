// SPDX-License-Identifier: Apache-2.0
// Random cases of packed sequences for the CPU and for a GPU: their tensors, padded and packed, and their operators.
#ifndef STOF_TESTS_CPP_ATTENTION_PACKED_CASES_H_
#define STOF_TESTS_CPP_ATTENTION_PACKED_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/ops/attention.h"
#include "tests/cpp/check.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test::attention {

inline constexpr const char* kPackedMasks[] = {"",
                                               "k <= q",
                                               "k <= q and q - k < 40",
                                               "abs(q - k) <= 3 or k < 2 or q < 2",
                                               "h % 2 == 0 or k <= q",
                                               "(q + k + b) % 3 != 0",
                                               "k < lengths[b] or k == q"};
inline constexpr const char* kPackedPolicies[] = {"zero", "nan", "mean", "all"};

// One batch of sequences of T positions at most, of which those from first[b] to first[b] + length[b] - 1 exist. Packed
// tensors have `spare` rows behind the last sequence.
struct PackedCase {
  int64_t B = 0, H = 1, G = 1, S = 1, T = 1, D = 8, Dv = 8, spare = 0;
  DType dtype = DType::kF32;
  bool has_queries = true, has_first = true, has_holes = false;
  int mask = 0, empty_rows = 0, threads = 1;
  std::vector<int32_t> length, first;

  int64_t tokens() const {
    int64_t sum = 0;
    for (const int32_t one : length) sum += one;
    return sum;
  }
  int64_t rows() const { return tokens() + spare; }
};

inline PackedCase DrawPacked(Random* random) {
  PackedCase c;
  c.B = random->Range(0, 5);
  c.G = random->Range(1, 2), c.H = c.G * random->Range(1, 3);
  c.T = random->Pick<int64_t>({1, 2, 17, 31, 64, 65, 97, 128, 130, 257});
  c.D = random->Pick<int64_t>({3, 8, 16, 17, 64}), c.Dv = random->Pick<int64_t>({3, 8, 16, 17, 64});
  c.dtype = random->OneIn(3) ? DType::kBF16 : DType::kF32;
  c.has_queries = !random->OneIn(4), c.has_first = !random->OneIn(3), c.has_holes = random->OneIn(3);
  c.S = c.has_queries ? c.T : random->Pick<int64_t>({1, 3, 16, 40});
  c.mask = static_cast<int>(random->Range(0, 6)), c.empty_rows = static_cast<int>(random->Range(0, 3));
  c.threads = static_cast<int>(random->Range(1, 3));
  c.spare = random->Pick<int64_t>({0, 0, 1, 7, 40});
  for (int64_t b = 0; b < c.B; ++b) {
    const auto length = random->Pick<int64_t>({0, 1, c.T, std::min<int64_t>(c.T, 96), random->Range(0, c.T)});
    c.length.push_back(static_cast<int32_t>(length));
    c.first.push_back(c.has_first ? static_cast<int32_t>(random->Range(0, c.T - length)) : 0);
  }
  return c;
}

struct Array {
  Tensor tensor;
  std::vector<char> bytes;

  Array() = default;
  Array(DType dtype, const std::vector<int64_t>& dims) {
    tensor.dtype = dtype;
    tensor.rank = static_cast<int32_t>(dims.size());
    std::copy(dims.begin(), dims.end(), tensor.dims);
    bytes.assign(static_cast<size_t>(tensor.Elements() * SizeOf(dtype)), static_cast<char>(0xff));
    tensor.data = bytes.data();
  }
  Array(const Array& other) : tensor(other.tensor), bytes(other.bytes) { tensor.data = bytes.data(); }
  Array& operator=(const Array& other) {
    tensor = other.tensor, bytes = other.bytes;
    tensor.data = bytes.data();
    return *this;
  }
  // bf16 is the upper half of fp32.
  void Set(int64_t i, float value) {
    const int64_t size = SizeOf(tensor.dtype);
    std::memcpy(bytes.data() + i * size, reinterpret_cast<const char*>(&value) + 4 - size, static_cast<size_t>(size));
  }
  float Get(int64_t i) const {
    const int64_t size = SizeOf(tensor.dtype);
    float value = 0;
    std::memcpy(reinterpret_cast<char*>(&value) + 4 - size, bytes.data() + i * size, static_cast<size_t>(size));
    return value;
  }
};

// Copies rows of [B, positions, heads · size] between the padded and the packed tensor of a case.
inline void CopyRows(const PackedCase& c, bool packs, Array* padded, Array* packed) {
  const int64_t row = padded->tensor.dims[2] * SizeOf(c.dtype), T = padded->tensor.dims[1];
  int64_t at = 0;
  for (size_t b = 0; b < c.length.size(); ++b) {
    for (int64_t i = 0; i < c.length[b]; ++i, ++at) {
      char* const from = padded->bytes.data() + (static_cast<int64_t>(b) * T + c.first[b] + i) * row;
      char* const to = packed->bytes.data() + at * row;
      std::memcpy(packs ? to : from, packs ? from : to, static_cast<size_t>(row));
    }
  }
}

inline Array DrawRows(const PackedCase& c, int64_t positions, int64_t width, Random* random) {
  Array rows(c.dtype, {c.B, positions, width});
  for (int64_t i = 0; i < rows.tensor.Elements(); ++i) rows.Set(i, random->Unit());
  return rows;
}

// Rows behind the last sequence hold `spare`.
inline Array Packed(const PackedCase& c, Array* padded, float spare) {
  Array packed(c.dtype, {1, c.rows(), padded->tensor.dims[2]});
  for (int64_t i = c.tokens() * padded->tensor.dims[2]; i < packed.tensor.Elements(); ++i) packed.Set(i, spare);
  CopyRows(c, true, padded, &packed);
  return packed;
}

inline Array Ints(const std::vector<int32_t>& values) {
  Array array(DType::kI32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(array.bytes.data(), values.data(), 4 * values.size());
  return array;
}

inline MapAttributes PackedAttributes(const PackedCase& c, const std::string& operands) {
  const std::string mask = kPackedMasks[c.mask];
  MapAttributes attributes;
  attributes.strings["mask"] = mask.empty() ? "pad[b, k]" : "(" + mask + ") and pad[b, k]";
  attributes.strings["empty_rows"] = kPackedPolicies[c.empty_rows];
  attributes.strings["layout"] = "BSN";
  attributes.strings["operands"] = operands;
  attributes.ints["allow_bf16"] = c.dtype != DType::kF32 && c.H % 2 == 0 ? 1 : 0;
  attributes.ints["num_heads"] = c.H, attributes.ints["kv_num_heads"] = c.G;
  return attributes;
}

inline std::unique_ptr<Op> MakePackedOp(const PackedCase& c, const std::string& operands,
                                        const std::vector<Tensor>& inputs) {
  std::unique_ptr<Op> op;
  Status status = AttentionDescription()->create(PackedAttributes(c, operands), &op);
  CHECK(status.ok(), status.message());
  status = op->Prepare(inputs.data(), static_cast<int>(inputs.size()));
  CHECK(status.ok(), status.message());
  return op;
}

// The tensors of a case, and which of them the padded and the packed call take.
struct PackedTensors {
  Array query, key, value, packed_query, packed_key, packed_value;
  Array pad, lengths, cumulative, first;
  std::string padded_operands = "pad", packed_operands;

  PackedTensors(const PackedCase& c, Random* random);
  std::vector<Tensor> PaddedInputs() const;
  std::vector<Tensor> PackedInputs(const PackedCase& c) const;
};

inline PackedTensors::PackedTensors(const PackedCase& c, Random* random)
    : query(DrawRows(c, c.S, c.H * c.D, random)),
      key(DrawRows(c, c.T, c.G * c.D, random)),
      value(DrawRows(c, c.T, c.G * c.Dv, random)),
      pad(DType::kBool, {c.B, c.T}) {
  // Keys that exist, and of them those that may be attended.
  std::fill(pad.bytes.begin(), pad.bytes.end(), 0);
  std::vector<int32_t> starts = {0}, own_lengths;
  for (size_t b = 0; b < c.length.size(); ++b) {
    char* const keys = pad.bytes.data() + static_cast<int64_t>(b) * c.T + c.first[b];
    for (int32_t i = 0; i < c.length[b]; ++i) keys[i] = c.has_holes && random->OneIn(5) ? 0 : 1;
    starts.push_back(starts.back() + c.length[b]);
    own_lengths.push_back(static_cast<int32_t>(random->Range(0, c.T)));
  }
  lengths = Ints(own_lengths), cumulative = Ints(starts), first = Ints(c.first);
  if (std::strstr(kPackedMasks[c.mask], "lengths") != nullptr) padded_operands += " lengths";
  packed_operands = padded_operands + (c.has_queries ? " cumulative_sequence_length" : " cumulative_key_length");
  if (c.has_first) packed_operands += " first_position";
  const float unread = std::numeric_limits<float>::quiet_NaN();
  if (c.has_queries) packed_query = Packed(c, &query, unread);
  packed_key = Packed(c, &key, unread), packed_value = Packed(c, &value, unread);
}

inline std::vector<Tensor> PackedTensors::PaddedInputs() const {
  std::vector<Tensor> inputs = {query.tensor, key.tensor, value.tensor, pad.tensor};
  if (padded_operands != "pad") inputs.push_back(lengths.tensor);
  return inputs;
}

inline std::vector<Tensor> PackedTensors::PackedInputs(const PackedCase& c) const {
  std::vector<Tensor> inputs = PaddedInputs();
  if (c.has_queries) inputs[0] = packed_query.tensor;
  inputs[1] = packed_key.tensor, inputs[2] = packed_value.tensor;
  inputs.push_back(cumulative.tensor);
  if (c.has_first) inputs.push_back(first.tensor);
  return inputs;
}

// Poisoned by NaN.
inline Array PackedOutput(const PackedCase& c) {
  return c.has_queries ? Array(c.dtype, {1, c.rows(), c.H * c.Dv}) : Array(c.dtype, {c.B, c.S, c.H * c.Dv});
}

inline void ComparePacked(const PackedCase& c, const Array& found, const Array& wanted) {
  const float tolerance = c.dtype == DType::kF32 ? 1e-5f : 2e-2f;
  for (int64_t i = 0; i < found.tensor.Elements(); ++i) {
    const float x = found.Get(i), y = wanted.Get(i);
    CHECK(std::isnan(x) == std::isnan(y) && (std::isnan(x) || std::fabs(x - y) <= tolerance), "element ", i, ": ", x,
          ", expected ", y);
  }
}

inline std::string Describe(const PackedCase& c) {
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " T ", c.T, " D ", c.D, " Dv ", c.Dv, " type ",
              static_cast<int>(c.dtype), " mask '", kPackedMasks[c.mask], "' empty rows ",
              kPackedPolicies[c.empty_rows], c.has_queries ? " queries" : " keys alone", " spare rows ", c.spare, ": ");
}

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_ATTENTION_PACKED_CASES_H_
