// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/cpu_attention/cpu_cases.h"

#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/memory.h"

namespace stof::test::attention {

void RunCase(const Case& c, CpuIsa isa, uint64_t seed, const Parallel& team) {
  const std::string where = Text("seed ", seed, " ", Describe(c));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const std::vector<float> relative = DrawRelative(c, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawSink(c, &random);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query);
  key.Fill(dense.key);
  value.Fill(dense.value);

  AttentionArgs args = MakeArgs(c, query, key, value, output);
  if (c.pad != Pad::kNone && c.mask != 12) args.mask.pad = data.pad.data();
  if (c.bias != Bias::kNone) {
    args.scores.bias = {bias.bytes.data(), bias.dtype, bias.stride[0], bias.stride[1], bias.stride[2], bias.stride[3]};
  }
  if (c.relative > 0) {
    args.scores.relative_bias = {relative.data(), c.relative, c.relative_shared ? 0 : c.relative,
                                 c.offset ? c.T - c.S : 0};
  }
  if (c.sink) args.scores.sink = {sink.data(), c.dtype};
  CpuAttentionConfig config = ChooseCpuAttention(args, team.threads);
  config.isa = isa;
  if (c.m > 0) config.m = c.m;
  if (c.n > 0) config.n = c.n;
  BoundMask bound;
  BindMask(c, data, config, &bound, &args);

  const Answer answer = Attend(dense);
  std::vector<char> first;
  Lse lse(c);
  for (const int threads : {1, 3}) {
    output.Reset();
    lse.Reset();
    // The output does not depend on whether the LSE is wanted.
    args.output.lse = threads == 1 || seed % 2 == 0 ? lse.values.data() : nullptr;
    args.output.lse_stride_b = lse.stride_b, args.output.lse_stride_h = lse.stride_h;
    // NaN in one run and ordinary numbers in the other: the old content must not matter.
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, threads), threads == 1 ? 0xff : 0x3f);
    const Status status = CpuAttention(args, config, workspace.get(), threads == 1 ? Parallel{} : team);
    CHECK(status.ok(), where, ": ", status.message());
    if (threads == 1) first = output.bytes;
    CHECK(first == output.bytes, where, ": 3 threads give other bits than 1");
    Compare(c, dense, answer, &output, Text(where, " threads ", threads));
    if (args.output.lse != nullptr) lse.Compare(c, answer, Text(where, " threads ", threads));
  }
}
void RunCases(const std::vector<Case>& cases, CpuIsa isa) {
  ThreadPool pool(3);
  Starved starved(pool.view());
  const size_t step = Effort() < 0.1 ? 5 : 1;
  for (size_t i = 0; i < cases.size(); i += step) {
    // Masks of run-time operands have evaluators made where they are needed (OpSaysThatThreadsGotNoMemory).
    const bool dynamic = cases[i].mask >= 10 && cases[i].mask <= 12;
    RunCase(cases[i], isa, i, dynamic ? pool.view() : starved.view());
    CountCases(1);
  }
}

}  // namespace stof::test::attention
