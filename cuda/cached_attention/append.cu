// SPDX-License-Identifier: Apache-2.0
// The append step of attention over a KV cache, in one kernel: RMS norm and rotary embedding of queries and keys,
// append to the cache, copy of the past where it is another buffer. The host reads no length: CTAs find the rows of
// their sequence by seqlens (cache_rows.h).
//
// Each CTA has one task. In the order of blockIdx:
//   check CTAs, one a sequence: length and positions
//   token CTAs: norm, rotary embedding and append; a warp for each head of each token
//   clear CTAs, one a KV head: zero the values behind those of the sequence
//   copy CTAs: copy the past into another buffer; or
//   slide CTAs: move the rows of a sliding-window cache to its front, and append behind them
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "cuda/cached_attention/append.h"
#include "cuda/cached_attention/cache_rows.h"
#include "cuda/choose_pages/update.h"
#include "cuda/common/head_transform.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/status.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSliceElements = 32;  // of a head: what a slide CTA moves
constexpr int kCopyPieces = 8;      // pieces that a thread of a copy CTA has in flight
constexpr int kSlidePieces = 16;    // pieces that a thread of a slide CTA has in flight
constexpr int64_t kMostCopyCtas = 2048;
constexpr int64_t kMostTileKeys = 128;  // of a KV tile of an attention kernel

struct AppendParams {
  CacheAppendArgs args;
  CacheShape shape;
  int32_t slots = 0;  // heads of a token for token CTAs: queries, then keys and values unless slide CTAs append these
  int64_t token_ctas = 0, clear_ctas = 0, copy_ctas = 0;
  int64_t copy_chunks = 0;  // of a head
};

// T: the type of new tokens. Stored: that of the caches and of staging.
// kSlides: there are slide CTAs. They need more registers than other launches should take.
template <typename T, typename Stored, int kPieceElements, bool kSlides>
class Append {
  using StoredPiece = Piece<Stored, kPieceElements>;

 public:
  __device__ Append(const AppendParams& params, float (*rows)[kLargestHead])
      : params_(params),
        args_(params.args),
        warp_(threadIdx.x / 32),
        transform_(params.args.transform, params.args.D, rows[warp_]) {}

  __device__ void Run() {
    int64_t cta = blockIdx.x;
    if (cta < args_.B) return Check(cta);
    cta -= args_.B;
    if (cta < params_.token_ctas) return AppendTokens(cta);
    cta -= params_.token_ctas;
    if (cta < params_.clear_ctas) return ClearBehind(cta);
    cta -= params_.clear_ctas;
    if constexpr (kSlides) {
      Slide(cta);
    } else {
      CopyPast(cta);
    }
  }

 private:
  enum Kind { kQuery, kKey, kValue };

  __device__ CacheRows RowsOf(int64_t b) const { return FindCacheRows(params_.shape, args_.seqlens[b]); }
  // The position of a token, which may lie beyond the rotary table.
  __device__ int64_t PositionOf(const CacheRows& rows, int64_t b, int64_t token) const {
    return args_.transform.position_ids != nullptr ? args_.transform.position_ids[b * args_.S + token]
                                                   : rows.past + token;
  }

  // ---- check CTAs: first_row, key_ends and is_invalid ----
  __device__ void Check(int64_t b) {
    const CacheRows rows = RowsOf(b);
    bool is_wrong = rows.is_invalid;
    if (args_.transform.cos != nullptr && !is_wrong) {
      for (int64_t token = threadIdx.x; token < rows.tokens; token += kThreads) {
        const int64_t position = PositionOf(rows, b, token);
        is_wrong = is_wrong || position < 0 || position >= args_.transform.rotary_rows;
      }
    }
    const int any = __syncthreads_or(is_wrong ? 1 : 0);
    if (threadIdx.x != 0) return;
    const int64_t first_row = is_staged() ? rows.held : rows.first_row;
    if (args_.first_row != nullptr) args_.first_row[b] = static_cast<int32_t>(first_row);
    if (args_.key_ends != nullptr) args_.key_ends[b] = static_cast<int32_t>(first_row + rows.tokens);
    if (args_.is_invalid != nullptr) args_.is_invalid[b] = any != 0 ? 1 : 0;
  }

  // ---- token CTAs ----
  __device__ void AppendTokens(int64_t cta) {
    const auto item = static_cast<uint32_t>(cta * kWarps + warp_), slots = static_cast<uint32_t>(params_.slots);
    const auto token = item / slots, tokens = static_cast<uint32_t>(args_.S);
    if (token >= args_.B * args_.S) return;
    const int slot = static_cast<int>(item % slots);
    const int64_t b = token / tokens, i = token % tokens;
    const int queries = args_.rotated_query != nullptr ? static_cast<int>(args_.H) : 0;
    const CacheRows rows = RowsOf(b);
    if (slot < queries) {
      T* const to = static_cast<T*>(args_.rotated_query) + ((b * args_.H + slot) * args_.S + i) * args_.D;
      Transform<T>(kQuery, rows, b, slot, i, to, nullptr, 0, static_cast<int>(args_.D));
      return;
    }
    const int head = (slot - queries) / 2;
    Store((slot - queries) % 2 == 0 ? kKey : kValue, rows, b, head, i, 0, static_cast<int>(args_.D));
  }

  // The rows of a key or value head in present, and in staging.
  __device__ Stored* Present(Kind kind, int64_t b, int64_t g) const {
    return static_cast<Stored*>(kind == kKey ? args_.present_key : args_.present_value) +
           (b * args_.G + g) * args_.capacity * args_.D;
  }
  __device__ Stored* Staging(Kind kind, int64_t b, int64_t g) const {
    return static_cast<Stored*>(kind == kKey ? args_.staging_key : args_.staging_value) +
           (b * args_.G + g) * args_.staging_capacity * args_.D;
  }
  __device__ bool is_staged() const { return args_.staging_key != nullptr; }
  // Stores elements [begin, end) of a new key or value in its row of the cache, and of staging.
  __device__ void Store(Kind kind, const CacheRows& rows, int64_t b, int64_t g, int64_t i, int begin, int end) {
    if (rows.is_invalid) return;
    const int64_t row = rows.first_row + i, staged = rows.held + i;
    Stored* const to = row >= 0 && row < args_.capacity ? Present(kind, b, g) + row * args_.D : nullptr;
    Stored* const other =
        is_staged() && staged < args_.staging_capacity ? Staging(kind, b, g) + staged * args_.D : nullptr;
    Transform<Stored>(kind, rows, b, g, i, to, other, begin, end);
  }

  // Norm and rotary embedding of one head of one token by a warp. Stores elements [begin, end) to `to` and `other`,
  // each of which may be nullptr; quantized where To is not T.
  template <typename To>
  __device__ void Transform(Kind kind, const CacheRows& rows, int64_t b, int64_t head, int64_t i, To* to, To* other,
                            int begin, int end) {
    const Strides& stride = kind == kQuery ? args_.query_stride : kind == kKey ? args_.key_stride : args_.value_stride;
    const auto* from = static_cast<const T*>(kind == kQuery ? args_.query
                                             : kind == kKey ? args_.key
                                                            : args_.value) +
                       b * stride.b + head * stride.h + i * stride.s;
    const auto* norm = static_cast<const T*>(kind == kQuery ? args_.transform.query_norm : args_.transform.key_norm);
    const bool rotates = kind != kValue && args_.transform.cos != nullptr;
    const KvScale& scale = kind == kKey ? args_.key_scale : args_.value_scale;
    const float* const own = std::is_same<To, T>::value ? nullptr : scale.data + head * scale.stride_g;
    transform_.Run(from, kind == kValue ? nullptr : norm, rotates, rotates ? PositionOf(rows, b, i) : 0,
                   i < rows.tokens, to, other, begin, end, own, scale.stride_d);
  }

  // ---- copy CTAs: a chunk of the past rows of a head, which are contiguous in all buffers ----
  __device__ void CopyPast(int64_t cta) {
    const int64_t heads = args_.B * args_.G * 2;
    for (int64_t at = cta; at < heads * params_.copy_chunks; at += params_.copy_ctas) {
      const int64_t head = at / params_.copy_chunks, bg = head / 2, b = bg / args_.G, g = bg % args_.G;
      const Kind kind = head % 2 == 0 ? kKey : kValue;
      const CacheRows rows = RowsOf(b);
      const int64_t row = args_.D / kPieceElements;  // pieces
      const int64_t kept_from = rows.kept_from * row, end = rows.is_invalid ? 0 : rows.held * row;
      const int64_t begin = at % params_.copy_chunks * (kThreads * kCopyPieces) + (is_staged() ? 0 : kept_from);
      if (begin >= end) continue;
      const auto* from = reinterpret_cast<const StoredPiece*>(
          static_cast<const Stored*>(kind == kKey ? args_.past_key : args_.past_value) +
          bg * args_.past_capacity * args_.D);
      auto* to = reinterpret_cast<StoredPiece*>(Present(kind, b, g));
      auto* staging = is_staged() ? reinterpret_cast<StoredPiece*>(Staging(kind, b, g)) : nullptr;
      StoredPiece held[kCopyPieces];
#pragma unroll
      for (int n = 0; n < kCopyPieces; ++n) {
        const int64_t piece = begin + n * kThreads + threadIdx.x;
        if (piece < end) held[n] = from[piece];
      }
#pragma unroll
      for (int n = 0; n < kCopyPieces; ++n) {
        const int64_t piece = begin + n * kThreads + threadIdx.x;
        if (piece >= end) continue;
        if (staging != nullptr) staging[piece] = held[n];
        if (piece >= kept_from) to[piece - kept_from] = held[n];
      }
    }
  }

  // ---- slide CTAs: a slice of the elements of a key or value head, in place ----
  __device__ void Slide(int64_t cta) {
    const int slices = (static_cast<int>(args_.D) + kSliceElements - 1) / kSliceElements;
    const int begin = static_cast<int>(cta % slices) * kSliceElements;
    const int end = min(begin + kSliceElements, static_cast<int>(args_.D));
    const int64_t head = cta / slices, bg = head / 2, b = bg / args_.G, g = bg % args_.G;
    const Kind kind = head % 2 == 0 ? kKey : kValue;
    const CacheRows rows = RowsOf(b);
    if (rows.is_invalid) return;
    if (is_staged() || rows.kept_from > 0) {
      MoveToFront(Present(kind, b, g), is_staged() ? Staging(kind, b, g) : nullptr, rows, begin, end);
    }
    // The move has read all of its rows before its last barrier.
    for (int64_t i = warp_; i < args_.S; i += kWarps) Store(kind, rows, b, g, i, begin, end);
    if (kind == kValue && !is_staged()) Clear(Present(kind, b, g), rows.first_row + args_.S, begin, end);
  }

  // Moves rows [kept_from, held) to the front, in ascending order, and copies rows [0, held) to staging where there is
  // one. A chunk writes rows before all that later chunks read. So one barrier a chunk suffices, between its reads and
  // its writes.
  __device__ void MoveToFront(Stored* head, Stored* staging, const CacheRows& rows, int begin, int end) {
    constexpr int kAcross = kSliceElements / kPieceElements, kDown = kThreads / kAcross;
    const int d = begin + static_cast<int>(threadIdx.x) % kAcross * kPieceElements;
    const int64_t down = static_cast<int>(threadIdx.x) / kAcross;
    for (int64_t first = staging != nullptr ? 0 : rows.kept_from; first < rows.held; first += kDown * kSlidePieces) {
      StoredPiece held[kSlidePieces];
#pragma unroll
      for (int n = 0; n < kSlidePieces; ++n) {
        const int64_t row = first + n * kDown + down;
        if (row < rows.held && d < end) held[n] = *reinterpret_cast<const StoredPiece*>(head + row * args_.D + d);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kSlidePieces; ++n) {
        const int64_t row = first + n * kDown + down, to = row - rows.kept_from;
        if (row >= rows.held || d >= end) continue;
        if (staging != nullptr) *reinterpret_cast<StoredPiece*>(staging + row * args_.D + d) = held[n];
        if (to >= 0 && rows.kept_from > 0) *reinterpret_cast<StoredPiece*>(head + to * args_.D + d) = held[n];
      }
    }
  }

  // ---- clear CTAs: value rows behind those of a sequence ----
  __device__ void ClearBehind(int64_t bg) {
    const int64_t b = bg / args_.G, g = bg % args_.G;
    const CacheRows rows = RowsOf(b);
    if (rows.is_invalid) return;
    const int64_t behind = args_.S + (is_staged() ? rows.held : rows.first_row);
    Clear(is_staged() ? Staging(kValue, b, g) : Present(kValue, b, g), behind, 0, static_cast<int>(args_.D));
  }
  // Elements [begin, end) of rows from `first` on.
  __device__ void Clear(Stored* head, int64_t first, int begin, int end) const {
    const int64_t capacity = is_staged() ? args_.staging_capacity : args_.capacity;
    const int64_t behind = min(min(first + kMostTileKeys - 1, args_.clear_end), capacity);
    const int width = end - begin;
    const int64_t start = max(first, int64_t{0});
    for (int64_t at = threadIdx.x; at < (behind - start) * width; at += kThreads) {
      head[(start + at / width) * args_.D + begin + at % width] = Round<Stored>(0.0f);
    }
  }

  const AppendParams& params_;
  const CacheAppendArgs& args_;
  const int warp_;
  HeadTransform<T, kPieceElements> transform_;
};

template <typename T, typename Stored, int kPieceElements, bool kSlides>
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ AppendParams params) {
  __shared__ float rows[kWarps][kLargestHead];
  WaitForPrevious();
  LetNextStart();
  Append<T, Stored, kPieceElements, kSlides>(params, rows).Run();
}

template <typename T, typename Stored, int kPieceElements, bool kSlides>
int Launch(const AppendParams& params, int64_t ctas, void* stream) {
  constexpr auto kKernel = AppendKernel<T, Stored, kPieceElements, kSlides>;
  return LaunchKernel<AppendParams, kKernel>(params, static_cast<unsigned>(ctas), kThreads, 0, stream,
                                             CanStartEarly<AppendParams, kKernel>());
}

// Whether all rows can be read and written `piece` elements at a time.
bool HasAlignedRows(const CacheAppendArgs& args, int64_t piece) {
  bool is_aligned = args.D % piece == 0;
  for (const Strides* stride : {&args.query_stride, &args.key_stride, &args.value_stride}) {
    is_aligned = is_aligned && stride->b % piece == 0 && stride->h % piece == 0 && stride->s % piece == 0;
  }
  const auto begins_aligned = [piece](const void* base, DType dtype) {
    return reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(piece * SizeOf(dtype)) == 0;
  };
  for (const void* base : {args.query, args.key, args.value, static_cast<const void*>(args.rotated_query)}) {
    is_aligned = is_aligned && begins_aligned(base, args.dtype);
  }
  for (const void* base : {args.past_key, args.past_value, static_cast<const void*>(args.present_key),
                           static_cast<const void*>(args.present_value)}) {
    is_aligned = is_aligned && begins_aligned(base, CacheType(args));
  }
  return is_aligned;
}

Status Check(const CacheAppendArgs& args) {
  const DType stored = CacheType(args);
  if (stored != args.dtype && !IsQuantized(stored)) {
    return Status::Error("the CUDA kernel takes caches of the type of query, int8 and fp8 e4m3fn, found data type " +
                         TypeText(stored));
  }
  if (IsQuantized(stored) && (args.key_scale.data == nullptr || args.value_scale.data == nullptr)) {
    return Status::Error("quantized caches need k_scale and v_scale");
  }
  if (args.D < 1 || args.D > kLargestHead) {
    return Status::Error("the CUDA kernel that appends to a cache takes head sizes up to " +
                         std::to_string(kLargestHead) + ", found " + std::to_string(args.D));
  }
  if (args.sliding_window == 0 && args.capacity < args.S) {
    return Status::Error("the cache holds " + std::to_string(args.capacity) + " positions, fewer than the " +
                         std::to_string(args.S) + " new ones");
  }
  if (args.sliding_window < 0 || args.sliding_window > std::max<int64_t>(args.capacity, 0)) {
    return Status::Error("the cache holds " + std::to_string(args.capacity) +
                         " positions, expected at least its sliding window of " + std::to_string(args.sliding_window));
  }
  if (args.staging_key != nullptr && args.staging_capacity < args.past_capacity + args.S) {
    return Status::Error("staging holds " + std::to_string(args.staging_capacity) + " rows, expected at least " +
                         std::to_string(args.past_capacity + args.S));
  }
  if (args.transform.cos != nullptr && (args.transform.rotary_rows < 1 || args.transform.rotary_size < 2 ||
                                        args.transform.rotary_size > args.D || args.transform.rotary_size % 2 != 0)) {
    return Status::Error("a rotary table of " + std::to_string(args.transform.rotary_rows) + " rows for " +
                         std::to_string(args.transform.rotary_size) +
                         " elements, expected at least 1 row and an even number up to " + std::to_string(args.D));
  }
  return Status();
}

template <typename T, typename Stored>
int LaunchAs(AppendParams params, void* stream, bool* is_too_large) {
  const CacheAppendArgs& args = params.args;
  constexpr int kPieceElements = 4;
  const bool is_aligned = HasAlignedRows(args, kPieceElements);
  const bool is_in_place = args.past_key == args.present_key || args.past_key == nullptr;
  const bool slides = args.sliding_window > 0 && args.past_key != nullptr && is_in_place && !args.is_first_prompt;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  params.slots = static_cast<int32_t>((args.rotated_query != nullptr ? args.H : 0) + (slides ? 0 : 2 * args.G));
  params.token_ctas = ceil_div(args.B * args.S * params.slots, kWarps);
  int64_t slide_ctas = 0;
  if (slides) slide_ctas = args.B * args.G * 2 * ceil_div(args.D, kSliceElements);
  if (args.clear_end > 0 && (!slides || args.staging_key != nullptr)) params.clear_ctas = args.B * args.G;
  if (!is_in_place && !args.is_first_prompt) {
    const int64_t pieces = args.past_capacity * args.D / (is_aligned ? kPieceElements : 1);
    params.copy_chunks = ceil_div(pieces, kThreads * kCopyPieces);
    params.copy_ctas = std::min(args.B * args.G * 2 * params.copy_chunks, kMostCopyCtas);
  }
  const int64_t ctas = args.B + params.token_ctas + params.clear_ctas + params.copy_ctas + slide_ctas;
  *is_too_large = ctas > std::numeric_limits<int32_t>::max() / kWarps;  // 32 bits count warps
  if (*is_too_large) return 0;
  const auto launch =
      is_aligned ? (slides ? Launch<T, Stored, kPieceElements, true> : Launch<T, Stored, kPieceElements, false>)
                 : (slides ? Launch<T, Stored, 1, true> : Launch<T, Stored, 1, false>);
  return launch(params, ctas, stream);
}

template <typename T>
int LaunchFor(const AppendParams& params, void* stream, bool* is_too_large) {
  const DType stored = CacheType(params.args);
  if (stored == DType::kI8) return LaunchAs<T, int8_t>(params, stream, is_too_large);
  if (stored == DType::kF8E4M3) return LaunchAs<T, Float8>(params, stream, is_too_large);
  return LaunchAs<T, T>(params, stream, is_too_large);
}

}  // namespace

Status AppendToCache(const CacheAppendArgs& args, const RunContext& context) {
  STOF_RETURN_IF_ERROR(Check(args));
  if (args.B == 0 || args.S == 0) return Status();
  AppendParams params;
  params.args = args;
  params.shape.S = args.S;
  params.shape.past_capacity = args.past_key == nullptr ? 0 : args.past_capacity;
  params.shape.capacity = args.capacity;
  params.shape.sliding_window = args.sliding_window;
  params.shape.most_keys = args.most_keys;
  params.shape.is_first_prompt = args.is_first_prompt;
  bool is_too_large = false;
  int error = 0;
  switch (args.dtype) {
    case DType::kF32:
      error = LaunchFor<float>(params, context.stream, &is_too_large);
      break;
    case DType::kF16:
      error = LaunchFor<__half>(params, context.stream, &is_too_large);
      break;
    case DType::kBF16:
      error = LaunchFor<__nv_bfloat16>(params, context.stream, &is_too_large);
      break;
    default:
      return Status::Error("the CUDA kernels take fp32, fp16 and bf16, found data type " + TypeText(args.dtype));
  }
  if (is_too_large) {
    return Status::Error("batch " + std::to_string(args.B) + " with " + std::to_string(args.S) + " tokens of " +
                         std::to_string(args.H) + " heads is too large for one launch: run with a smaller batch");
  }
  STOF_RETURN_IF_ERROR(ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that appends to a cache"));
  if (!args.page_bounds.given()) return Status();
  return ToStatus(static_cast<cudaError_t>(LaunchUpdateBounds(args, context.stream)),
                  "launch of the kernel that computes key bounds of pages");
}

}  // namespace cuda
}  // namespace stof
