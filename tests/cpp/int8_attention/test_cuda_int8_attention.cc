// SPDX-License-Identifier: Apache-2.0
// Attention with 8-bit operands on a GPU, by the library's own choice, against attention in double precision.
// STOF_CUDA_CAPABILITY=80 runs the sm_80 kernels on other devices. test_int8_attention.cc and
// test_int8_attention_sm80.cc compare the same kernels with their definition.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/int8_attention/fp8_device.h"
#include "tests/cpp/int8_attention/int8_problem.h"

namespace stof::test::int8 {
namespace {

template <DType kType>
double RoundTo(double x) {
  char bytes[2];
  StoreFloat(kType, x, bytes);
  return LoadFloat(kType, bytes);
}

// A problem on the device.
class Runner {
 public:
  Runner(const Case& c, const Dense& p, DType dtype, EmptyRows empty_rows = EmptyRows::kZero)
      : c_(c), p_(p), dtype_(dtype) {
    args_.mask.empty_rows = empty_rows;
    args_.shape = {c.B, c.H, c.G, c.S, c.T, p.D, p.D, dtype};
    args_.query = {Upload(p.query), {c.H * c.S * p.D, c.S * p.D, p.D}};
    args_.key = {Upload(p.key), {c.G * c.T * p.D, c.T * p.D, p.D}};
    args_.value = {Upload(p.value), args_.key.stride};
    args_.output.data = memory_.Take(p.query.size() * 2);
    args_.output.stride = args_.query.stride;
    args_.scores.scale = static_cast<float>(p.scale);
    if (c.sink) args_.scores.sink = {Upload(p.sink), dtype};
    if (c.lse) {
      args_.output.lse = static_cast<float*>(memory_.Take(4 * static_cast<size_t>(c.B * c.H * c.S)));
      args_.output.lse_stride_b = c.H * c.S, args_.output.lse_stride_h = c.S;
    }
    CHECK(MakeAttentionMask(c.mask.text, {}, &mask_).ok());
    if (!c.padding) return;
    pad_.data = memory_.Upload(p.exists.data(), p.exists.size());
    pad_.dtype = DType::kBool, pad_.rank = 2, pad_.dims[0] = c.B, pad_.dims[1] = c.T;
  }

  Result Run(AttentionPrecision precision, const std::string& where) {
    const size_t count = p_.query.size();
    CHECK_CUDA(cudaMemset(args_.output.data, 0xff, count * 2));
    args_.precision = precision;
    RunContext context;
    context.on_cuda = true;
    context.self = &memory_;
    context.allocate = [](void* self, size_t bytes) { return static_cast<DeviceMemory*>(self)->Take(bytes); };
    const Status status = FindCudaBackend()->attention.run(args_, c_.padding ? &pad_ : nullptr, *mask_,
                                                           {c_.B, c_.H, c_.S, c_.T, 0}, {}, context);
    CHECK(status.ok(), where, ": ", status.message());
    std::vector<char> bytes(count * 2);
    CHECK_CUDA(cudaMemcpy(bytes.data(), args_.output.data, bytes.size(), cudaMemcpyDeviceToHost));
    Result result;
    for (size_t i = 0; i < count; ++i) result.output.push_back(LoadFloat(dtype_, &bytes[2 * i]));
    if (!c_.lse) return result;
    std::vector<float> lse(static_cast<size_t>(c_.B * c_.H * c_.S));
    CHECK_CUDA(cudaMemcpy(lse.data(), args_.output.lse, 4 * lse.size(), cudaMemcpyDeviceToHost));
    result.lse.assign(lse.begin(), lse.end());
    return result;
  }

 private:
  const void* Upload(const std::vector<double>& values) {
    std::vector<char> bytes(values.size() * 2);
    for (size_t i = 0; i < values.size(); ++i) StoreFloat(dtype_, values[i], &bytes[2 * i]);
    return memory_.Upload(bytes.data(), bytes.size());
  }

  const Case c_;
  const Dense& p_;
  const DType dtype_;
  DeviceMemory memory_;
  AttentionArgs args_;
  Tensor pad_;
  std::shared_ptr<const AttentionMask> mask_;
};

template <DType kType>
void CheckCase(const Case& c, int64_t D, uint64_t seed) {
  const std::string where =
      Text("seed ", seed, " D ", D, kType == DType::kF16 ? " fp16" : " bf16", " mask '", c.mask.text, "'");
  Random random(seed);
  const Dense p = Draw(c, D, false, RoundTo<kType>, &random);
  const Result exact = Attend(p);
  Runner runner(c, p, kType);
  const double full = RelativeRms(runner.Run(AttentionPrecision::kFull, where).output, exact.output);
  for (const auto precision : {AttentionPrecision::kInt8, AttentionPrecision::kInt8Fp8}) {
    const bool fp8 = precision == AttentionPrecision::kInt8Fp8 && HasFp8();
    const Result found = runner.Run(precision, where);
    const double error = RelativeRms(found.output, exact.output);
    CHECK(error < (fp8 ? 0.045 : 0.015), where, ": ", error, " from attention, fp8 ", fp8);
    // Else the kernel computed in full precision.
    CHECK(error > (fp8 ? 0.015 : 2 * full), where, ": ", error, " from attention, fp8 ", fp8, ", in full precision ",
          full);
    for (size_t i = 0; i < found.lse.size(); ++i) {
      CHECK(found.lse[i] == exact.lse[i] || std::fabs(found.lse[i] - exact.lse[i]) < 0.1, where, ": LSE ", i, " is ",
            found.lse[i], ", expected ", exact.lse[i]);
    }
  }
  CountCases(1);
}

TEST(CudaInt8Attention) {
  uint64_t seed = 0;
  for (const int64_t D : {64, 128}) {
    for (const MaskCase& mask : {kNoMask, kCausal, kWindow, kScattered, kEmptyRows}) {
      for (const Keys keys : {Keys::kGaussian, Keys::kOffset}) {
        Case c;
        ++seed;
        c.mask = mask, c.keys = keys;
        c.B = 1 + static_cast<int64_t>(seed % 2), c.H = 4, c.G = seed % 3 == 0 ? 4 : static_cast<int64_t>(seed % 3);
        c.S = std::vector<int64_t>{300, 257, 449, 130}[seed % 4];
        c.T = std::vector<int64_t>{900, 1024, 777}[seed % 3];
        c.padding = c.B == 2 && seed % 4 < 2, c.sink = seed % 5 == 1, c.lse = seed % 3 != 0;
        CheckCase<DType::kF16>(c, D, seed);
        CheckCase<DType::kBF16>(c, D, seed);
      }
    }
  }
}

// Fully masked rows: the mean of all values, or attention over all keys, padded ones among them.
template <DType kType>
void CheckEmptyRows(const Case& c, int64_t D, EmptyRows empty_rows, uint64_t seed) {
  const std::string where = Text("seed ", seed, " D ", D, " policy ", static_cast<int>(empty_rows), " padding ",
                                 c.padding, kType == DType::kF16 ? " fp16" : " bf16");
  Random random(seed);
  Dense p = Draw(c, D, false, RoundTo<kType>, &random);
  for (double& x : p.key) x = std::isnan(x) ? RoundTo<kType>(Gaussian(&random)) : x;
  Runner runner(c, p, kType, empty_rows);
  const Result full = runner.Run(AttentionPrecision::kFull, where),
               found = runner.Run(AttentionPrecision::kInt8, where);
  int64_t empty = 0;
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    const auto first = p.allowed.begin() + static_cast<std::ptrdiff_t>(row * c.T), end = first + c.T;
    if (std::find(first, end, 1) != end) continue;
    std::fill(first, end, uint8_t{1}), ++empty;
    if (empty_rows != EmptyRows::kMean) continue;
    for (int64_t d = 0; d < D; ++d) p.query[static_cast<size_t>(row * D + d)] = 0;
  }
  CHECK(empty > 100, where);
  const std::vector<double> wanted = Attend(p).output;
  CHECK(RelativeRms(full.output, wanted) < 0.005, where, ": in full precision ", RelativeRms(full.output, wanted));
  CHECK(RelativeRms(found.output, wanted) < 0.015, where, ": ", RelativeRms(found.output, wanted));
  CountCases(1);
}

TEST(CudaInt8AttentionOfFullyMaskedRows) {
  uint64_t seed = 100;
  for (const int64_t D : {64, 128}) {
    for (const EmptyRows empty_rows : {EmptyRows::kMean, EmptyRows::kAll}) {
      for (const bool padding : {false, true}) {
        Case c;
        c.mask = kEmptyRows, c.keys = Keys::kOffset, c.S = 333, c.T = 500, c.lse = false;
        c.B = 2, c.H = 4, c.G = 2, c.padding = padding;
        CheckEmptyRows<DType::kF16>(c, D, empty_rows, ++seed);
        CheckEmptyRows<DType::kBF16>(c, D, empty_rows, ++seed);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test::int8
