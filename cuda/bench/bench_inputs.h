// SPDX-License-Identifier: Apache-2.0
// For the programs that time attention in fp16 and bf16: an error ends them; rows on the device, of which queries see
// levels that blocks of keys have.
#ifndef STOF_CUDA_BENCH_BENCH_INPUTS_H_
#define STOF_CUDA_BENCH_BENCH_INPUTS_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

inline void ExitUnlessOk(const stof::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

inline uint16_t ToBits(stof::DType dtype, double x) {
  if (dtype == stof::DType::kF16) return __half_as_ushort(__double2half(x));
  return __bfloat16_as_ushort(__double2bfloat16(x));
}

// A query points along one of so many directions, and a key has a level for each.
constexpr int kDirections = 4;
constexpr double kReach = 8;  // the length of queries along their direction

// Random rows [rows, D] on the device, whose first elements are those of `levels` [rows, kDirections].
inline void* MakeRows(stof::DType dtype, int64_t rows, int64_t D, const std::vector<double>& levels, uint32_t seed) {
  constexpr int64_t kPart = int64_t{1} << 22;  // rows repeat: the host takes its time to draw numbers
  std::mt19937 random(seed);
  std::normal_distribution<double> draw(0, 0.5);
  const int64_t drawn = std::min(rows * D, kPart) / D * D;
  std::vector<uint16_t> values(static_cast<size_t>(drawn));
  for (uint16_t& x : values) x = ToBits(dtype, draw(random));
  char* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(2 * rows * D)));
  for (int64_t at = 0; at < rows * D; at += drawn) {
    const auto bytes = static_cast<size_t>(2 * std::min(drawn, rows * D - at));
    CHECK_CUDA(cudaMemcpy(memory + 2 * at, values.data(), bytes, cudaMemcpyHostToDevice));
  }
  if (levels.empty()) return memory;
  std::vector<uint16_t> first(levels.size());
  for (size_t i = 0; i < levels.size(); ++i) first[i] = ToBits(dtype, levels[i]);
  constexpr size_t kBytes = 2 * kDirections;
  CHECK_CUDA(cudaMemcpy2D(memory, static_cast<size_t>(2 * D), first.data(), kBytes, kBytes, static_cast<size_t>(rows),
                          cudaMemcpyHostToDevice));
  return memory;
}

// Levels of queries [heads, S]: `group` neighbours point along one direction, the next ones along the next.
inline std::vector<double> QueryLevels(int64_t heads, int64_t S, int64_t group) {
  std::vector<double> levels(static_cast<size_t>(heads * S * kDirections), 0.0);
  for (int64_t row = 0; row < heads * S; ++row) {
    levels[static_cast<size_t>(row * kDirections + row % S / group % kDirections)] = kReach;
  }
  return levels;
}

// Levels of keys [rows]: `low` for the blocks of `block` keys and the directions where is_low(a number drawn from
// [0, 1), the block's first row), else 0.
template <typename IsLow>
std::vector<double> KeyLevels(int64_t rows, int64_t block, double low, const IsLow& is_low) {
  std::mt19937 random(7);
  std::vector<double> levels(static_cast<size_t>(rows * kDirections), 0.0);
  for (int64_t first = 0; first < rows; first += block) {
    for (int direction = 0; direction < kDirections; ++direction) {
      if (!is_low(static_cast<double>(random() >> 8) * 0x1p-24, first)) continue;
      for (int64_t k = first; k < std::min(rows, first + block); ++k) {
        levels[static_cast<size_t>(k * kDirections + direction)] = low;
      }
    }
  }
  return levels;
}

#endif  // STOF_CUDA_BENCH_BENCH_INPUTS_H_
