// SPDX-License-Identifier: Apache-2.0
// The problems that bench_cuda_attention times.
#ifndef STOF_CUDA_BENCH_ATTENTION_ROWS_H_
#define STOF_CUDA_BENCH_ATTENTION_ROWS_H_

#include <cstdint>

struct Row {
  const char* name;
  const char* mask;
  int64_t B, H, S, D;
  int64_t T = 0, G = 0;  // 0: as S and H
  int launches = 1;      // in one graph; the time is divided by them
  // A bias of every pair, of fp16 or fp32, of each head or of all; of distances up to 128 or any; softcap.
  enum Extra { kNone, kPairs, kSharedPairs, kWidePairs, kNear, kDistances, kSoftcap } extra = kNone;
};

inline constexpr const char* kScattered12 =
    "(7919 * (q // 128) + 104729 * (k // 128) + 31 * (q // 128) * (k // 128) + 17 * (q // 128) * (q // 128)) "
    "% 1009 % 100 < 12";
inline constexpr const char* kScattered22 =
    "(7919 * (q // 128) + 104729 * (k // 128) + 31 * (q // 128) * (k // 128) + 17 * (q // 128) * (q // 128)) "
    "% 1009 % 100 < 22";

inline constexpr Row kRows[] = {
    {"dense", "", 1, 16, 4096, 64},
    {"causal", "k <= q", 1, 16, 4096, 64},
    {"window-128", "abs(q - k) <= 128", 1, 16, 4096, 64},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 16, 4096, 64},
    {"dilated", "abs(q - k) <= 256 and (q - k) % 2 == 0", 1, 16, 4096, 64},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 16, 4096, 64},
    {"bits", "(q - k) % 5 != 0", 1, 16, 4096, 64},
    {"dense", "", 16, 12, 512, 64},
    {"window-128", "abs(q - k) <= 128", 16, 12, 512, 64},
    {"dense", "", 1, 32, 8192, 128},
    {"bits", "(q - k) % 5 != 0", 1, 32, 8192, 128},
    {"causal", "k <= q", 1, 32, 8192, 128},
    {"window-128", "abs(q - k) <= 128", 1, 32, 8192, 128},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 32, 8192, 128},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 32, 8192, 128},
    {"causal-1024", "k <= q and q - k < 1024", 1, 32, 8192, 128},
    {"dilated", "abs(q - k) <= 256 and (q - k) % 2 == 0", 1, 32, 8192, 128},
    // Full tiles alone, scattered: 7 and 13 in 61.
    {"blocks-11", "(37 * (q // 128) + 25 * (k // 128) + 7 * (q // 128) * (k // 128)) % 61 < 7", 1, 32, 8192, 128},
    {"blocks-11", "(37 * (q // 128) + 25 * (k // 128) + 7 * (q // 128) * (k // 128)) % 61 < 7", 1, 32, 8192, 128, 0, 8},
    {"blocks-21", "(37 * (q // 128) + 25 * (k // 128) + 7 * (q // 128) * (k // 128)) % 61 < 13", 1, 32, 8192, 128},
    // And in rows of different lengths.
    {"blocks-12", kScattered12, 1, 32, 8192, 128},
    {"blocks-22", kScattered22, 1, 32, 8192, 128},
    {"blocks-12", kScattered12, 1, 16, 8192, 64},
    {"blocks-22", kScattered22, 1, 16, 8192, 64},
    {"causal", "k <= q", 16, 12, 128, 64},
    {"causal", "k <= q", 16, 12, 256, 64},
    {"dense", "", 1, 12, 128, 64, 0, 0, 100},
    {"causal", "k <= q", 1, 12, 128, 64, 0, 0, 100},
    {"dense", "", 1, 12, 512, 64, 0, 0, 100},
    {"causal", "k <= q", 1, 12, 512, 64, 0, 0, 100},
    {"dense", "", 1, 12, 1024, 64, 0, 0, 100},
    {"causal", "k <= q", 1, 12, 1024, 64, 0, 0, 100},
};

inline constexpr Row kWideRows[] = {
    {"dense", "", 1, 16, 4096, 160},
    {"causal", "k <= q", 1, 16, 4096, 160},
    {"dense", "", 1, 16, 4096, 192},
    {"causal", "k <= q", 1, 16, 4096, 192},
    {"dense", "", 1, 16, 4096, 256},
    {"causal", "k <= q", 1, 16, 4096, 256},
    {"bits", "(q - k) % 5 != 0", 1, 16, 4096, 256},
};

inline constexpr Row kExtraRows[] = {
    {"near", "", 1, 16, 4096, 64, 0, 0, 1, Row::kNear},
    {"distances", "", 1, 16, 4096, 64, 0, 0, 1, Row::kDistances},
    {"pairs", "", 1, 16, 4096, 64, 0, 0, 1, Row::kPairs},
    {"shared", "", 1, 16, 4096, 64, 0, 0, 1, Row::kSharedPairs},
    {"wide", "", 1, 16, 4096, 64, 0, 0, 1, Row::kWidePairs},
    {"softcap", "", 1, 16, 4096, 64, 0, 0, 1, Row::kSoftcap},
    {"distances", "k <= q", 1, 16, 4096, 64, 0, 0, 1, Row::kDistances},
    {"near", "abs(q - k) <= 128", 1, 16, 4096, 64, 0, 0, 1, Row::kNear},
    {"near", "", 16, 12, 512, 64, 0, 0, 1, Row::kNear},
    {"near", "", 1, 12, 512, 64, 0, 0, 100, Row::kNear},
    {"near", "", 1, 32, 4096, 128, 0, 0, 1, Row::kNear},
    {"distances", "k <= q", 1, 32, 4096, 128, 0, 0, 1, Row::kDistances},
    {"pairs", "", 1, 32, 4096, 128, 0, 0, 1, Row::kPairs},
    {"softcap", "k <= q", 1, 32, 4096, 128, 0, 0, 1, Row::kSoftcap},
};

inline constexpr Row kFewRows[] = {
    {"every-16", "(q - k) % 16 == 0", 1, 16, 4096, 64},    {"every-32", "(q - k) % 32 == 0", 1, 16, 4096, 64},
    {"every-64", "(q - k) % 64 == 0", 1, 16, 4096, 64},    {"every-128", "(q - k) % 128 == 0", 1, 16, 4096, 64},
    {"every-256", "(q - k) % 256 == 0", 1, 16, 4096, 64},  {"every-512", "(q - k) % 512 == 0", 1, 16, 4096, 64},
    {"window-4", "abs(q - k) <= 4", 1, 16, 4096, 64},      {"every-16", "(q - k) % 16 == 0", 1, 32, 8192, 128},
    {"every-32", "(q - k) % 32 == 0", 1, 32, 8192, 128},   {"every-64", "(q - k) % 64 == 0", 1, 32, 8192, 128},
    {"every-128", "(q - k) % 128 == 0", 1, 32, 8192, 128}, {"every-256", "(q - k) % 256 == 0", 1, 32, 8192, 128},
    {"every-512", "(q - k) % 512 == 0", 1, 32, 8192, 128}, {"window-4", "abs(q - k) <= 4", 1, 32, 8192, 128},
};

inline constexpr Row kLongRows[] = {
    {"dense", "", 1, 32, 8192, 128},
    {"causal", "k <= q", 1, 32, 8192, 128},
    {"window-128", "abs(q - k) <= 128", 1, 32, 8192, 128},
    {"causal", "k <= q", 1, 32, 32768, 128},
    {"window-4096", "k <= q and q - k < 4096", 1, 32, 32768, 128},
    {"dense", "", 1, 16, 4096, 64},
    {"dense", "", 1, 16, 8192, 64},
};

// One new token against a cache; the query is the last of T positions.
inline constexpr const char* kWindow = "k <= q and q - k < 1024";
inline constexpr const char* kStride = "k <= q and (q - k < 512 or (k // 64 + h) % 8 == 0)";
inline constexpr Row kDecodeRows[] = {
    {"dense", "", 1, 32, 1, 128, 1 << 10, 8},       {"dense", "", 1, 32, 1, 128, 1 << 11, 8},
    {"dense", "", 1, 32, 1, 128, 1 << 12, 8},       {"dense", "", 1, 32, 1, 128, 1 << 13, 8},
    {"dense", "", 1, 32, 1, 128, 1 << 14, 8},       {"dense", "", 1, 32, 1, 128, 1 << 15, 8},
    {"dense", "", 1, 32, 1, 128, 1 << 16, 8},       {"dense", "", 1, 32, 1, 128, 1 << 17, 8},
    {"window", kWindow, 1, 32, 1, 128, 1 << 13, 8}, {"window", kWindow, 1, 32, 1, 128, 1 << 17, 8},
    {"stride", kStride, 1, 32, 1, 128, 1 << 13, 8}, {"stride", kStride, 1, 32, 1, 128, 1 << 15, 8},
    {"stride", kStride, 1, 32, 1, 128, 1 << 17, 8}, {"dense", "", 1, 16, 1, 64, 1 << 10, 16},
    {"dense", "", 1, 16, 1, 64, 1 << 13, 16},       {"dense", "", 1, 16, 1, 64, 1 << 15, 16},
    {"dense", "", 1, 16, 1, 64, 1 << 17, 16},       {"window", kWindow, 1, 16, 1, 64, 1 << 13, 16},
    {"window", kWindow, 1, 16, 1, 64, 1 << 17, 16}, {"stride", kStride, 1, 16, 1, 64, 1 << 15, 16},
    {"stride", kStride, 1, 16, 1, 64, 1 << 17, 16},
};

#endif  // STOF_CUDA_BENCH_ATTENTION_ROWS_H_
