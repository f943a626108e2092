// SPDX-License-Identifier: Apache-2.0
// Quantized attention beside attention in fp32, on the CPU kernels alone: every row and instruction set in each
// round, the least CPU time of a call on one thread. H 12, D 64, codes int8.
//   bench_quantized_attention [ROUNDS [NAME]]    NAME: rows that have it in their names
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/quantized_attention.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace {

struct Row {
  const char* name;
  const char* mask;  // empty: dense
  int64_t S;
  bool has_rounding, has_bias;  // of scores
};
constexpr Row kRows[] = {{"dense", "", 512, true, false},
                         {"dense", "", 2048, true, false},
                         {"window of 129", "abs(q - k) <= 64", 512, true, false},
                         {"window of 129", "abs(q - k) <= 64", 2048, true, false},
                         {"dense, no rounding of scores", "", 2048, false, false},
                         {"dense, bias", "", 2048, true, true}};
constexpr int64_t kHeads = 12, kSize = 64;

double Seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void FailOn(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// One row in one of the two forms, ready to run.
class Bench {
 public:
  Bench(const Row& row, CpuIsa isa, bool is_quantized) : is_quantized_(is_quantized) {
    const auto count = static_cast<size_t>(kHeads * row.S * kSize);
    uint32_t state = 1;
    for (int i = 0; i < 3; ++i) {
      codes_[i].resize(count);
      numbers_[i].resize(count);
      for (size_t at = 0; at < count; ++at) {
        state = state * 1664525u + 1013904223u;
        codes_[i][at] = static_cast<int8_t>(static_cast<int>(state >> 24) - 128);
        numbers_[i][at] = 0.01f * static_cast<float>(codes_[i][at]);
      }
    }
    AttentionArgs& args = quantized_.attention;
    args.shape = {1, kHeads, kHeads, row.S, row.S, kSize, kSize, DType::kF32};
    const Strides stride = {kHeads * row.S * kSize, row.S * kSize, kSize};
    TensorView* const views[] = {&args.query, &args.key, &args.value};
    for (int i = 0; i < 3; ++i) {
      *views[i] = {is_quantized ? static_cast<const void*>(codes_[i].data()) : numbers_[i].data(), stride};
    }
    output_.resize(count);
    args.output.data = output_.data();
    args.output.stride = stride;
    args.scores.scale = 0.125f;
    if (row.has_bias) {
      bias_.assign(static_cast<size_t>(row.S * row.S), 0.25f);
      args.scores.bias = {bias_.data(), DType::kF32, 0, 0, row.S, 1};
    }
    for (Quantization* q : {&quantized_.query, &quantized_.key, &quantized_.value}) *q = {0.01f, 0, true};
    quantized_.weight = {1.0f / 255.0f, 0, false};
    if (row.has_rounding) quantized_.score = {0.15f, 0, true};
    if (is_quantized) {
      config_ = ChooseCpuQuantizedAttention(quantized_);
      config_.isa = isa;
      UseMask(row, config_.m, config_.n);
      Reserve(CpuQuantizedAttentionWorkspace(quantized_, config_, 1));
    } else {
      float_config_ = ChooseCpuAttention(args, 1);
      float_config_.isa = isa;
      UseMask(row, float_config_.m, float_config_.n);
      Reserve(CpuAttentionWorkspace(args, float_config_, 1));
    }
  }

  void Run() {
    const double begin = Seconds();
    FailOn(is_quantized_ ? CpuQuantizedAttention(quantized_, config_, workspace_, Parallel())
                         : CpuAttention(quantized_.attention, float_config_, workspace_, Parallel()));
    best_ = std::min(best_, Seconds() - begin);
  }
  double best() const { return best_; }

 private:
  void UseMask(const Row& row, int m, int n) {
    if (row.mask[0] == '\0') return;
    MaskExpr expr;
    FailOn(MaskExpr::Parse(row.mask, {}, &expr));
    FailOn(BuildBlockMask(expr, {1, kHeads, row.S, row.S, 0}, m, n, &blocks_));
    quantized_.attention.mask.fixed = StaticMask::OfBlocks(&blocks_);
  }
  void Reserve(size_t bytes) {
    memory_.resize(bytes + 64);
    workspace_ = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64);
  }

  bool is_quantized_;
  QuantizedAttentionArgs quantized_;
  CpuQuantizedAttentionConfig config_;
  CpuAttentionConfig float_config_;
  BlockMask blocks_;
  std::vector<int8_t> codes_[3];
  std::vector<float> numbers_[3], output_, bias_;
  std::vector<char> memory_;
  void* workspace_ = nullptr;
  double best_ = 1e30;
};

int Main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 10;
  const char* const name = argc > 2 ? argv[2] : "";
  std::printf("%-30s %6s %-14s %12s %12s %8s\n", "row", "S", "set", "fp32 ms", "int8 ms", "ratio");
  for (const Row& row : kRows) {
    if (std::strstr(row.name, name) == nullptr) continue;
    std::vector<CpuIsa> isas;
    std::vector<std::unique_ptr<Bench>> all;
    for (int isa = 1; isa <= static_cast<int>(BestCpuIsa()); ++isa) {
      if (!IsCpuIsaSupported(static_cast<CpuIsa>(isa))) continue;
      isas.push_back(static_cast<CpuIsa>(isa));
      for (const bool is_quantized : {false, true}) {
        all.push_back(std::make_unique<Bench>(row, isas.back(), is_quantized));
      }
    }
    for (int round = 0; round < rounds; ++round) {
      for (const auto& bench : all) bench->Run();
    }
    for (size_t i = 0; i < isas.size(); ++i) {
      const double fp32 = all[2 * i]->best(), int8 = all[2 * i + 1]->best();
      std::printf("%-30s %6lld %-14s %12.2f %12.2f %7.2fx\n", row.name, static_cast<long long>(row.S),
                  CpuIsaName(isas[i]), 1e3 * fp32, 1e3 * int8, fp32 / int8);
    }
  }
  return 0;
}

}  // namespace
}  // namespace stof

int main(int argc, char** argv) { return stof::Main(argc, argv); }
