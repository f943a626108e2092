// SPDX-License-Identifier: Apache-2.0
// Types that every operator and every kernel shares. Plain structs; no framework type.
#ifndef STOF_PLUGINS_CORE_BASE_TYPES_H_
#define STOF_PLUGINS_CORE_BASE_TYPES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/base/inline.h"

namespace stof {

// Values of onnx.TensorProto.DataType, so that adapters cast instead of translating.
enum class DType : int32_t {
  kUndefined = 0,
  kF32 = 1,
  kU8 = 2,
  kI8 = 3,
  kI32 = 6,
  kI64 = 7,
  kBool = 9,
  kF16 = 10,
  kF64 = 11,
  kBF16 = 16,
  kF8E4M3 = 17,  // FLOAT8E4M3FN
};

// Bytes of an element; 0 for kUndefined.
STOF_ALWAYS_INLINE constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kU8:
    case DType::kI8:
    case DType::kBool:
    case DType::kF8E4M3:
      return 1;
    default:
      return 0;
  }
}

// Whether a type is one of those that the operators compute in.
constexpr bool IsFloat(DType dtype) { return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16; }

constexpr int kMaxRank = 8;

// A dense row-major tensor. data is nullptr where only type and shape are known, and where the tensor has no element.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kUndefined;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};

  int64_t Elements() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= dims[i];
    return count;
  }
};

// A tensor without data. The list needs no memory, which counts where a run takes microseconds.
template <typename Dims>
Tensor TensorOfShape(DType dtype, const Dims& dims) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}
inline Tensor TensorOfShape(DType dtype, std::initializer_list<int64_t> dims) {
  return TensorOfShape<std::initializer_list<int64_t>>(dtype, dims);
}

// An element type for messages: its number in onnx.TensorProto.DataType.
inline std::string TypeText(DType dtype) { return std::to_string(static_cast<int>(dtype)); }

// "[2, 3]", for messages.
inline std::string ShapeText(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.dims[i]);
  return text + "]";
}

// Tensors by the role that an attribute gives them: the operands that a mask reads.
using Tables = std::vector<std::pair<std::string, Tensor>>;

// Elements between neighbours along batch, head and position; the head size is contiguous.
struct Strides {
  int64_t b = 0;
  int64_t h = 0;
  int64_t s = 0;
};

// Runs fn(user, i) for i in [0, count), on up to `threads` threads at once. count may exceed threads.
struct Parallel {
  void (*run)(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) = nullptr;
  void* self = nullptr;
  int threads = 1;
};

// An instruction set that CPU kernels are compiled for; cpu_isas.h lists them. The value 0 is portable C++.
enum class CpuIsa : int32_t;
// The best one of this machine. The environment variable STOF_CPU_ISA may ask for a lesser one.
CpuIsa BestCpuIsa();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_TYPES_H_
