// SPDX-License-Identifier: Apache-2.0
// When runs are recorded, launched and queued: by keys, with a backend that counts.
#include <cstdint>
#include <string>
#include <vector>

#include "plugins/trt/recordings.h"
#include "tests/cpp/check.h"
#include "tests/trt/place.h"

namespace stof::test {
namespace {

struct Bench {
  Bench() { *LastSeen() = Seen(), LastSeen()->records = LastSeen()->launches = true; }
  ~Bench() { *LastSeen() = Seen(); }
  // One run on memory of this number, as letters: q queued, r recorded and launched, l launched.
  char Run(uintptr_t memory) {
    const Seen before = *LastSeen();
    const int queued = queued_;
    const RunContext context;
    const Status status = recordings.Run(
        {reinterpret_cast<const void*>(memory)}, context,
        [](void* self, const RunContext&) { return static_cast<Bench*>(self)->Queue(); }, this);
    CHECK(status.ok(), status.message());
    const int recorded = LastSeen()->recorded - before.recorded, launched = LastSeen()->launched - before.launched;
    CHECK(launched + (queued_ - queued) - recorded == 1, "what is asked for once runs once");
    return recorded == 1 && launched == 1 ? 'r' : launched == 1 ? 'l' : 'q';
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
  trt::Recordings recordings;

 private:
  int queued_ = 0;
};

}  // namespace

TEST(TrtRecordings) {
  {
    Bench bench;
    bench.Expect({1, 1, 1, 1}, "qrll");
    bench.Expect({2, 1, 2, 1, 2}, "qlrll");              // alternating buffers
    bench.Expect({3, 4, 3, 4, 1, 2, 3, 4}, "qqrrllll");  // as many as are kept
    bench.recordings.Clear();
    CHECK(LastSeen()->dropped == 4, "a context that forgets drops its graphs");
    bench.Expect({1, 1}, "qr");
  }
  CHECK(LastSeen()->dropped == 1, "and when it ends");
  {
    Bench bench;
    for (int round = 0; round < 3; ++round) bench.Expect({1, 2, 3, 4, 5}, "qqqqq");  // more than are kept: none
    bench.Expect({5, 4, 5, 4, 3}, "rrllr");
  }
  {
    Bench bench;  // new memory all the time, each twice
    std::string found;
    for (uintptr_t i = 1; i <= 100; ++i) found += {bench.Run(i), bench.Run(i)};
    CHECK(LastSeen()->recorded == 64, LastSeen()->recorded);
    CHECK(LastSeen()->dropped == 60, LastSeen()->dropped);
    CHECK(found.substr(198) == "qq", found.substr(190));
    CountCases(1);
  }
  {
    Bench bench;  // a host's own graph gets the kernels
    bench.Expect({1, 1}, "qr");
    LastSeen()->captured = true;
    bench.Expect({1, 1, 2, 2}, "qqqq");
    LastSeen()->captured = false;
    bench.Expect({1, 2}, "lq");
  }
  {
    Bench bench;  // another thread records
    LastSeen()->busy = true;
    bench.Expect({1, 1, 1}, "qqq");
    LastSeen()->busy = false;
    bench.Expect({1, 1}, "rl");
  }
  for (const bool records : {false, true}) {
    Bench bench;
    LastSeen()->records = records, LastSeen()->launches = false;
    for (int round = 0; round < 5; ++round) CHECK(bench.Run(1) == 'q', round);
    CHECK(LastSeen()->recorded == (records ? 1 : 0) && LastSeen()->launched == 0);
    bench.recordings.Clear();
    LastSeen()->records = LastSeen()->launches = true;
    bench.Expect({1, 1, 1}, "qrl");
  }
}

}  // namespace stof::test
