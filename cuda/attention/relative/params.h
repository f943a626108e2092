// SPDX-License-Identifier: Apache-2.0
// Parameters of kernels with relative terms of the score, set by cuda/attention/relative/terms.h. Plain C++.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_PARAMS_H_
#define STOF_CUDA_ATTENTION_RELATIVE_PARAMS_H_

#include <cstdint>

namespace stof {
namespace cuda {

// A term that is a function of the distance of key and query: the expanded table (band.h). rows nullptr: there is none.
struct BandTerm {
  const void* rows = nullptr;       // [heads, blocks, pairs of k-steps, 32, 8], of the type of query
  const float* row_bias = nullptr;  // [heads, expanded rows]: added to the products; nullptr: 0, not in fp32
  const float* factor = nullptr;    // the same, fp32: row = (high + low) * factor
  int64_t row_stride_h = 0;         // in bytes; 0: all heads share one table
  int64_t row_bias_stride_h = 0;    // of row bias and factor, in elements
};

// A term of parts of positions, as the rows of a grid are: the product of each query or key and every row that pairs
// can name. That of a pair is products[..., key_part[j] - query_part[i] + offset]. products nullptr: there is none.
struct PartTerm {
  const float* products = nullptr;      // [B, H, S or T, columns]
  const int32_t* key_part = nullptr;    // [T]
  const int32_t* query_part = nullptr;  // [S]
  int32_t offset = 0, columns = 0;
};

// relative_bias is multiplied by it. data nullptr: by 1.
struct BiasFactor {
  const void* data = nullptr;  // [B, H, S] by strides
  int64_t stride_b = 0, stride_h = 0;
  int32_t is_float = 0;  // else it has the type of query
};

struct RelativeTerm {
  BandTerm band;
  PartTerm part;
};

struct RelativeParams {
  RelativeTerm key[2];  // queries times rows: relative_key, relative_key1
  RelativeTerm query;   // keys times rows: relative_query
  BiasFactor factor;
};

// Where a kernel has relative terms, its parameters of them: a base that is empty else, so that kernels without keep
// their code.
template <bool kRelative>
struct RelativeParamsOf {
  const RelativeParams& relative;
};
template <>
struct RelativeParamsOf<false> {};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_PARAMS_H_
