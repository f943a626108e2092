// SPDX-License-Identifier: Apache-2.0
// The append step of a paged KV cache, in one kernel: norm and rotary embedding of queries and keys, which are stored
// in rows of the cache, and the check of each sequence. The host reads no length and no block.
//
// Each CTA has one task. In the order of blockIdx:
//   check CTAs, one a sequence: lengths, blocks, slots, positions
//   token CTAs: norm, rotary embedding and append; a warp for each head of each token
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/common/head_transform.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/status.h"
#include "cuda/paged_attention/append.h"
#include "cuda/paged_attention/batch_check.cuh"
#include "cuda/paged_attention/token_rows.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct PagedParams {
  PagedAppendArgs args;
  PagedShape shape;
  int64_t rows = 0;  // of the cache
};

template <typename T, int kPieceElements>
class PagedAppend {
 public:
  __device__ PagedAppend(const PagedParams& params, float (*rows)[kLargestHead])
      : params_(params),
        args_(params.args),
        tokens_(params.args.tokens),
        warp_(threadIdx.x / 32),
        transform_(params.args.tokens.transform, params.args.tokens.D, rows[warp_]) {}

  __device__ void Run() {
    const bool is_legal = IsLegalBatch<kThreads>(params_.shape, args_.cumulative);
    const int64_t cta = blockIdx.x;
    if (cta < args_.B) return Check(cta, is_legal);
    if (is_legal) Append(cta - args_.B);
  }

 private:
  __device__ PagedSequence SequenceOf(int64_t b) const {
    return MakePagedSequence(params_.shape, args_.cumulative[b], args_.cumulative[b + 1], args_.past[b]);
  }
  __device__ const int32_t* TableOf(int64_t b) const { return args_.pages.table + b * args_.pages.columns; }

  // ---- check CTAs: first_rows, key_ends and is_invalid ----
  __device__ void Check(int64_t b, bool is_legal) {
    const PagedSequence sequence = SequenceOf(b);
    bool is_wrong = !is_legal || sequence.is_invalid;
    const int64_t end = sequence.past + sequence.tokens;
    if (!is_wrong && sequence.tokens > 0) {
      is_wrong = tokens_.transform.cos != nullptr && end > tokens_.transform.rotary_rows;
      const int32_t* const table = TableOf(b);
      const int64_t first = FirstPagedKey(args_.window_left, sequence.past) >> args_.pages.shift;
      for (int64_t column = first + threadIdx.x; column << args_.pages.shift < end; column += kThreads) {
        is_wrong = is_wrong || table[column] < 0 || table[column] >= args_.pages.pages;
      }
      for (int64_t i = threadIdx.x; args_.slot_mapping != nullptr && i < sequence.tokens; i += kThreads) {
        const int32_t slot = args_.slot_mapping[sequence.begin + i];
        is_wrong = is_wrong || slot < -1 || slot >= params_.rows;
      }
    }
    const int any = __syncthreads_or(is_wrong ? 1 : 0);
    if (threadIdx.x != 0) return;
    args_.is_invalid[b] = any;
    args_.first_rows[b] = any != 0 ? 0 : static_cast<int32_t>(sequence.past);
    // A sequence without tokens has no query: nothing reads its keys.
    args_.key_ends[b] = any != 0 || sequence.tokens == 0 ? 0 : static_cast<int32_t>(end);
  }

  // ---- token CTAs ----
  __device__ void Append(int64_t cta) {
    const int64_t slots = tokens_.H + 2 * tokens_.G, item = cta * kWarps + warp_, t = item / slots;
    if (t >= args_.cumulative[args_.B]) return;  // padding, or no token
    const int64_t slot = item % slots, b = FindSequence(args_.cumulative, args_.B, t);
    const PagedSequence sequence = SequenceOf(b);
    if (sequence.is_invalid) return;
    const int64_t i = t - sequence.begin, position = sequence.past + i;
    const int64_t H = tokens_.H, G = tokens_.G, D = tokens_.D;
    const bool rotates = tokens_.transform.cos != nullptr;
    if (slot < H) {
      T* const to = static_cast<T*>(tokens_.rotated_query) + ((b * H + slot) * args_.most_queries + i) * D;
      const T* const from = RowOf(tokens_.query, tokens_.query_stride, slot, t);
      transform_.Run(from, static_cast<const T*>(tokens_.transform.query_norm), rotates, position, true, to, nullptr, 0,
                     static_cast<int>(D));
      return;
    }
    const int64_t row =
        args_.slot_mapping != nullptr ? args_.slot_mapping[t] : RowOfPosition(params_.shape, TableOf(b), position);
    if (row < 0 || row >= params_.rows) return;
    const bool is_key = slot < H + G;
    const int64_t g = is_key ? slot - H : slot - H - G;
    T* const to = static_cast<T*>(is_key ? tokens_.present_key : tokens_.present_value) + (row * G + g) * D;
    const T* const from =
        is_key ? RowOf(tokens_.key, tokens_.key_stride, g, t) : RowOf(tokens_.value, tokens_.value_stride, g, t);
    transform_.Run(from, is_key ? static_cast<const T*>(tokens_.transform.key_norm) : nullptr, is_key && rotates,
                   position, true, to, nullptr, 0, static_cast<int>(D));
  }
  __device__ const T* RowOf(const void* base, const Strides& stride, int64_t head, int64_t t) const {
    return static_cast<const T*>(base) + head * stride.h + t * stride.s;
  }

  const PagedParams& params_;
  const PagedAppendArgs& args_;
  const CacheAppendArgs& tokens_;
  const int warp_;
  HeadTransform<T, kPieceElements> transform_;
};

template <typename T, int kPieceElements>
__global__ void __launch_bounds__(kThreads) PagedAppendKernel(const __grid_constant__ PagedParams params) {
  __shared__ float rows[kWarps][kLargestHead];
  WaitForPrevious();
  LetNextStart();
  PagedAppend<T, kPieceElements>(params, rows).Run();
}

template <typename T, int kPieceElements>
int Launch(const PagedParams& params, int64_t ctas, void* stream) {
  constexpr auto kKernel = PagedAppendKernel<T, kPieceElements>;
  return LaunchKernel<PagedParams, kKernel>(params, static_cast<unsigned>(ctas), kThreads, 0, stream,
                                            CanStartEarly<PagedParams, kKernel>());
}

// Whether all rows can be read and written `piece` elements at a time.
bool HasAlignedRows(const CacheAppendArgs& args, int64_t piece) {
  bool is_aligned = args.D % piece == 0;
  for (const Strides* stride : {&args.query_stride, &args.key_stride, &args.value_stride}) {
    is_aligned = is_aligned && stride->h % piece == 0 && stride->s % piece == 0;
  }
  const auto bytes = static_cast<uintptr_t>(piece * SizeOf(args.dtype));
  for (const void* base :
       {args.query, args.key, args.value, static_cast<const void*>(args.present_key),
        static_cast<const void*>(args.present_value), static_cast<const void*>(args.rotated_query)}) {
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(base) % bytes == 0;
  }
  return is_aligned;
}

template <typename T>
int LaunchFor(const PagedParams& params, int64_t ctas, void* stream) {
  constexpr int kPieceElements = 4;
  return HasAlignedRows(params.args.tokens, kPieceElements) ? Launch<T, kPieceElements>(params, ctas, stream)
                                                            : Launch<T, 1>(params, ctas, stream);
}

Status CopyCaches(const PagedAppendArgs& args, cudaStream_t stream) {
  const CacheAppendArgs& a = args.tokens;
  const auto bytes = static_cast<size_t>(a.capacity * a.G * a.D * SizeOf(a.dtype));
  if (a.present_key == args.from_key || bytes == 0) return Status();
  constexpr char kWhat[] = "copy of a paged cache";
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaMemcpyAsync(a.present_key, args.from_key, bytes, cudaMemcpyDeviceToDevice, stream), kWhat));
  return ToStatus(cudaMemcpyAsync(a.present_value, args.from_value, bytes, cudaMemcpyDeviceToDevice, stream), kWhat);
}

}  // namespace

Status ReadCounts(const int32_t* from, int64_t count, int32_t* to, const RunContext& context) {
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  constexpr char kWhat[] = "copy of sequence lengths to the host";
  const auto bytes = static_cast<size_t>(count) * sizeof(int32_t);
  STOF_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), kWhat));
  return ToStatus(cudaStreamSynchronize(stream), kWhat);
}

Status AppendToPages(const PagedAppendArgs& args, const RunContext& context) {
  const CacheAppendArgs& a = args.tokens;
  if (a.D < 1 || a.D > kLargestHead) {
    return Status::Error("the CUDA kernel that appends to a cache takes head sizes up to " +
                         std::to_string(kLargestHead) + ", found " + std::to_string(a.D));
  }
  STOF_RETURN_IF_ERROR(CopyCaches(args, static_cast<cudaStream_t>(context.stream)));
  if (args.B == 0) return Status();
  PagedParams params;
  params.args = args;
  params.shape = ShapeOf(args);
  params.rows = args.pages.pages << args.pages.shift;
  const int64_t token_ctas = (a.S * (a.H + 2 * a.G) + kWarps - 1) / kWarps, ctas = args.B + token_ctas;
  if (ctas > std::numeric_limits<int32_t>::max()) {
    return Status::Error(std::to_string(a.S) + " tokens of " + std::to_string(a.H) +
                         " heads are too many for one launch: run with fewer tokens");
  }
  int error = 0;
  switch (a.dtype) {
    case DType::kF32:
      error = LaunchFor<float>(params, ctas, context.stream);
      break;
    case DType::kF16:
      error = LaunchFor<__half>(params, ctas, context.stream);
      break;
    case DType::kBF16:
      error = LaunchFor<__nv_bfloat16>(params, ctas, context.stream);
      break;
    default:
      return Status::Error("the CUDA kernels take fp32, fp16 and bf16, found data type " + TypeText(a.dtype));
  }
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that appends to a paged cache");
}

}  // namespace cuda
}  // namespace stof
