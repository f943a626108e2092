// SPDX-License-Identifier: Apache-2.0
// Launches of the sparse MLP's kernels for one type of tokens.
#ifndef STOF_CUDA_SPARSE_MLP_LAUNCH_CUH_
#define STOF_CUDA_SPARSE_MLP_LAUNCH_CUH_

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "cuda/sparse_mlp/dense.cuh"
#include "cuda/sparse_mlp/down_tile.cuh"
#include "cuda/sparse_mlp/hidden_tile.cuh"
#include "cuda/sparse_mlp/select_many.cuh"
#include "cuda/sparse_mlp/select_tile.cuh"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
namespace mlp {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls function(bits, is_vectorized) with constants. kBits: those that such rows may have.
template <int kBits, int... kMoreBits, typename Function>
int WithRows(const NeuronRows& rows, const Function& function) {
  if constexpr (sizeof...(kMoreBits) > 0) {
    if (rows.bits != kBits) return WithRows<kMoreBits...>(rows, function);
  }
  return rows.is_vectorized ? function(Constant<kBits>(), std::true_type())
                            : function(Constant<kBits>(), std::false_type());
}

// Calls function(tokens of a tile) with a constant.
template <typename Function>
int WithTileTokens(int tokens, const Function& function) {
  return tokens <= 8 ? function(Constant<8>()) : function(Constant<16>());
}

template <void (*kKernel)(const MlpParams)>
int LaunchEarly(const MlpParams& params, int64_t ctas, int threads, void* stream, int shared_bytes = 0) {
  // With one token, all kernels ask for the same carveout of shared memory: an SM changes it only when idle, and the
  // next kernel would not start beside the one that ends. More tokens need the L1 cache.
  if (params.T == 1) {
    static std::atomic<uint64_t> set{0};  // a bit for each of the first 64 devices
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return static_cast<int>(error);
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (bit != 0 && (set.load(std::memory_order_relaxed) & bit) == 0) {
      const cudaError_t refused =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      if (refused != cudaSuccess) return static_cast<int>(refused);
      set.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  return LaunchKernel<MlpParams, kKernel>(params, static_cast<unsigned>(ctas), static_cast<unsigned>(threads),
                                          shared_bytes, stream, CanStartEarly<MlpParams, kKernel>());
}

template <typename T>
int LaunchProject(const MlpParams& params, void* stream) {
  return WithRows<8, 0>(params.predictor_down, [&](auto bits, auto vectors) {
    constexpr int kBits = decltype(bits)::value;
    constexpr bool kVectors = decltype(vectors)::value;
    if constexpr (kVectors && sizeof(T) == 2) {
      if (TakesTiles(params.T)) {
        return WithTileTokens(params.T, [&](auto tokens) {
          return LaunchEarly<ProjectTileKernel<T, kBits, decltype(tokens)::value>>(
              params, params.projected_stride / kTileRows, kProjectTileThreads, stream);
        });
      }
    }
    return params.T == 1 ? LaunchEarly<ProjectKernel<T, kBits, kVectors, 1>>(params, params.projected_stride,
                                                                             kProjectThreads, stream)
                         : LaunchEarly<ProjectKernel<T, kBits, kVectors, 8>>(params, params.projected_stride,
                                                                             kProjectThreads, stream);
  });
}

template <typename T>
int LaunchScore(const MlpParams& params, void* stream) {
  const int64_t ctas = std::max(1, params.segments);
  return WithRows<8, 0>(params.predictor_up, [&](auto bits, auto vectors) {
    constexpr int kBits = decltype(bits)::value;
    constexpr bool kVectors = decltype(vectors)::value;
    if constexpr (kVectors && sizeof(T) == 2) {
      if (TakesTiles(params.T)) {
        return WithTileTokens(params.T, [&](auto tokens) {
          return LaunchEarly<ScoreTileKernel<T, kBits, decltype(tokens)::value>>(params, ctas, kMlpThreads, stream);
        });
      }
    }
    return params.T == 1 ? LaunchEarly<ScoreKernel<T, kBits, kVectors, 1>>(params, ctas, kMlpThreads, stream)
                         : LaunchEarly<ScoreKernel<T, kBits, kVectors, 4>>(params, ctas, kMlpThreads, stream);
  });
}

template <typename T>
int LaunchSelect(const MlpParams& params, void* stream) {
  return LaunchEarly<SelectKernel<T>>(params, std::max(1, params.segments), kMlpThreads, stream);
}

template <typename T>
int LaunchHidden(const MlpParams& params, int ctas, void* stream) {
  const bool has_gate = params.gate_rows.data != nullptr;
  if (!has_gate && params.up_rows.data == nullptr) {
    return LaunchEarly<HiddenOfGateKernel<T>>(params, ctas, kMlpThreads, stream);
  }
  return WithRows<4, 8, 0>(has_gate ? params.gate_rows : params.up_rows, [&](auto bits, auto vectors) {
    constexpr int kBits = decltype(bits)::value;
    constexpr bool kVectors = decltype(vectors)::value;
    const auto launch = [&](auto with_gate, auto with_up) {
      constexpr bool kHasGate = decltype(with_gate)::value, kHasUp = decltype(with_up)::value;
      if constexpr (kVectors && kBits == 0 && sizeof(T) == 2) {
        if (TakesTiles(params.T)) {
          return WithTileTokens(params.T, [&](auto tokens) {
            return LaunchEarly<HiddenTileKernel<T, kHasGate, kHasUp, decltype(tokens)::value>>(
                params, ctas, kMlpThreads, stream, kRingsBytes);
          });
        }
      }
      if constexpr (kVectors && kBits == 0) {
        return params.T == 1 ? LaunchEarly<HiddenStreamKernel<T, kHasGate, kHasUp, true>>(params, ctas, kMlpThreads,
                                                                                          stream, kRingsBytes)
                             : LaunchEarly<HiddenStreamKernel<T, kHasGate, kHasUp, false>>(params, ctas, kMlpThreads,
                                                                                           stream, kRingsBytes);
      } else if constexpr (kVectors) {
        if (params.T == 1) {
          return LaunchEarly<HiddenKernel<T, kBits, true, kHasGate, kHasUp, true>>(params, ctas, kMlpThreads, stream);
        }
      }
      if constexpr (!kVectors || kBits != 0) {
        return LaunchEarly<HiddenKernel<T, kBits, kVectors, kHasGate, kHasUp, false>>(params, ctas, kMlpThreads,
                                                                                      stream);
      }
    };
    if (!has_gate) return launch(std::false_type(), std::true_type());
    return params.up_rows.data == nullptr ? launch(std::true_type(), std::false_type())
                                          : launch(std::true_type(), std::true_type());
  });
}

template <typename T>
int LaunchDown(const MlpParams& params, void* stream) {
  const int64_t ctas = int64_t{params.slices} * params.splits * params.token_groups;
  return WithRows<4, 8, 0>(params.down_rows, [&](auto bits, auto vectors) {
    constexpr int kBits = decltype(bits)::value;
    constexpr bool kVectors = decltype(vectors)::value;
    if constexpr (kVectors && kBits == 0 && sizeof(T) == 2) {
      if (TakesTiles(params.T)) {
        return WithTileTokens(params.T, [&](auto tokens) {
          constexpr int kTokens = decltype(tokens)::value;
          return LaunchEarly<DownTileKernel<T, kTokens>>(params, int64_t{params.slices} * params.splits, kMlpThreads,
                                                         stream, BlockRing<kTokens>::kBytes);
        });
      }
    }
    const auto launch = [&](auto tokens) {
      constexpr int kTokens = decltype(tokens)::value;
      if constexpr (kVectors && kBits == 0) {
        return LaunchEarly<DownStreamKernel<T, kTokens>>(params, ctas, kMlpThreads, stream, kRingsBytes);
      } else {
        return LaunchEarly<DownKernel<T, kBits, kVectors, kTokens>>(params, ctas, kMlpThreads, stream);
      }
    };
    if (params.group_tokens == 1) return launch(Constant<1>());
    return params.group_tokens == 4 ? launch(Constant<4>()) : launch(Constant<8>());
  });
}

template <typename Params, void (*kKernel)(const Params)>
int LaunchWith(const Params& params, int64_t ctas, int threads, int shared_bytes, void* stream) {
  return LaunchKernel<Params, kKernel>(params, static_cast<unsigned>(ctas), static_cast<unsigned>(threads),
                                       shared_bytes, stream, CanStartEarly<Params, kKernel>());
}

template <typename T>
int LaunchSelectMany(const MlpSelectManyParams& params, void* stream) {
  const int64_t token_tiles = CeilDiv(params.T, int64_t{kManyTokens});
  if (params.R > 0) {
    const int64_t ctas = CeilDiv(params.projected_stride, int64_t{kManyRows}) * token_tiles * params.splits;
    const auto project = [&](auto vectors) {
      constexpr bool kVectors = decltype(vectors)::value;
      return LaunchWith<MlpSelectManyParams, ProjectManyKernel<T, kVectors>>(
          params, ctas, kManyThreads, ProjectManyTiles<T, kVectors>::kSharedBytes, stream);
    };
    int error = params.is_down_vectorized ? project(std::true_type()) : project(std::false_type());
    if (error != 0) return error;
    error = LaunchWith<MlpSelectManyParams, TermsManyKernel<T>>(params, params.T, kManyThreads, 0, stream);
    if (error != 0) return error;
  }
  const int64_t ctas = CeilDiv(params.F, int64_t{kManyRows}) * token_tiles;
  const auto score = [&](auto vectors) {
    constexpr bool kVectors = decltype(vectors)::value;
    return LaunchWith<MlpSelectManyParams, ScoreManyKernel<T, kVectors>>(
        params, ctas, kManyThreads, ScoreManyTiles<T, kVectors>::kSharedBytes, stream);
  };
  return params.is_up_vectorized ? score(std::true_type()) : score(std::false_type());
}
template <typename T>
int LaunchMaskedHidden(const MlpMaskedHiddenParams& params, void* stream) {
  const int64_t ctas = params.T * CeilDiv(CeilDiv(params.F, int64_t{kMlpChunk}), int64_t{kMlpThreads});
  return params.is_vectorized
             ? LaunchWith<MlpMaskedHiddenParams, MaskedHiddenKernel<T, true>>(params, ctas, kMlpThreads, 0, stream)
             : LaunchWith<MlpMaskedHiddenParams, MaskedHiddenKernel<T, false>>(params, ctas, kMlpThreads, 0, stream);
}
template <typename T>
int LaunchDequantize(const MlpDequantizeParams& params, int ctas, void* stream) {
  return WithRows<4, 8>(params.rows, [&](auto bits, auto vectors) {
    constexpr int kBits = decltype(bits)::value;
    constexpr bool kVectors = decltype(vectors)::value;
    using Params = MlpDequantizeParams;
    return params.is_down
               ? LaunchWith<Params, DequantizeKernel<T, kBits, kVectors, true>>(params, ctas, kMlpThreads, 0, stream)
               : LaunchWith<Params, DequantizeKernel<T, kBits, kVectors, false>>(params, ctas, kMlpThreads, 0, stream);
  });
}

template <typename T>
const MlpKernels& KernelsOf() {
  static constexpr MlpKernels kernels = [] {
    MlpKernels k = {};
    k.project = LaunchProject<T>, k.score = LaunchScore<T>, k.select = LaunchSelect<T>;
    k.hidden = LaunchHidden<T>, k.down = LaunchDown<T>;
    if constexpr (sizeof(T) == 2) {
      k.select_many = LaunchSelectMany<T>, k.dequantize = LaunchDequantize<T>, k.masked_hidden = LaunchMaskedHidden<T>;
    }
    return k;
  }();
  return kernels;
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_LAUNCH_CUH_
