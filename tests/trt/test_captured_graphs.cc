// SPDX-License-Identifier: Apache-2.0
// When runs are captured, replayed and queued: by keys, with a backend that counts.
#include <cstdint>
#include <string>
#include <vector>

#include "plugins/trt/captured_graphs.h"
#include "tests/cpp/check.h"
#include "tests/trt/place.h"

namespace stof::test {
namespace {

struct Bench {
  Bench() { *LastSeen() = Seen(), LastSeen()->can_capture = LastSeen()->can_replay = true; }
  ~Bench() { *LastSeen() = Seen(); }
  // One run on memory of this number, as letters: q queued, c captured and replayed, r replayed.
  char Run(uintptr_t memory) {
    const Seen before = *LastSeen();
    const int queued = queued_;
    const RunContext context;
    const Status status = graphs.Run(
        {reinterpret_cast<const void*>(memory)}, context,
        [](void* self, const RunContext&) { return static_cast<Bench*>(self)->Queue(); }, this);
    CHECK(status.ok(), status.message());
    const int captured = LastSeen()->captured - before.captured, replayed = LastSeen()->replayed - before.replayed;
    CHECK(replayed + (queued_ - queued) - captured == 1, "what is asked for once runs once");
    return captured == 1 && replayed == 1 ? 'c' : replayed == 1 ? 'r' : 'q';
  }
  Status Queue() {
    ++queued_;
    return Status();
  }
  void Expect(const std::vector<uintptr_t>& memory, const std::string& letters) {
    std::string found;
    for (const uintptr_t one : memory) found += Run(one);
    CHECK(found == letters, "found ", found, ", expected ", letters);
    CountCases(1);
  }
  trt::CapturedGraphs graphs;

 private:
  int queued_ = 0;
};

}  // namespace

TEST(TrtCapturedGraphs) {
  {
    Bench bench;
    bench.Expect({1, 1, 1, 1}, "qcrr");
    bench.Expect({2, 1, 2, 1, 2}, "qrcrr");              // alternating buffers
    bench.Expect({3, 4, 3, 4, 1, 2, 3, 4}, "qqccrrrr");  // as many as are kept
    bench.graphs.Clear();
    CHECK(LastSeen()->dropped == 4, "a context that forgets drops its graphs");
    bench.Expect({1, 1}, "qc");
  }
  CHECK(LastSeen()->dropped == 1, "and when it ends");
  {
    Bench bench;
    for (int round = 0; round < 3; ++round) bench.Expect({1, 2, 3, 4, 5}, "qqqqq");  // more than are kept: none
    bench.Expect({5, 4, 5, 4, 3}, "ccrrc");
  }
  {
    Bench bench;  // new memory all the time, each twice
    std::string found;
    for (uintptr_t i = 1; i <= 100; ++i) found += {bench.Run(i), bench.Run(i)};
    CHECK(LastSeen()->captured == 64, LastSeen()->captured);
    CHECK(LastSeen()->dropped == 60, LastSeen()->dropped);
    CHECK(found.substr(198) == "qq", found.substr(190));
    CountCases(1);
  }
  {
    Bench bench;  // a host's own graph gets the kernels
    bench.Expect({1, 1}, "qc");
    LastSeen()->is_capturing = true;
    bench.Expect({1, 1, 2, 2}, "qqqq");
    LastSeen()->is_capturing = false;
    bench.Expect({1, 2}, "rq");
  }
  {
    Bench bench;  // another thread captures
    LastSeen()->busy = true;
    bench.Expect({1, 1, 1}, "qqq");
    LastSeen()->busy = false;
    bench.Expect({1, 1}, "cr");
  }
  for (const bool can_capture : {false, true}) {
    Bench bench;
    LastSeen()->can_capture = can_capture, LastSeen()->can_replay = false;
    for (int round = 0; round < 5; ++round) CHECK(bench.Run(1) == 'q', round);
    CHECK(LastSeen()->captured == (can_capture ? 1 : 0) && LastSeen()->replayed == 0);
    bench.graphs.Clear();
    LastSeen()->can_capture = LastSeen()->can_replay = true;
    bench.Expect({1, 1, 1}, "qcr");
  }
}

}  // namespace stof::test
