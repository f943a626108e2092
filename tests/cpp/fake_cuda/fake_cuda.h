// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that masks and counters use, without a device: linked in place of libcudart. Device
// memory is the host's, so that tests can read it and AddressSanitizer finds accesses beyond it; fresh memory holds
// 0xaa. Streams work when somebody waits for them, as late as a device may.
#ifndef STOF_TESTS_CPP_FAKE_CUDA_FAKE_CUDA_H_
#define STOF_TESTS_CPP_FAKE_CUDA_FAKE_CUDA_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "plugins/core/base/status.h"

namespace stof::test::fake {

// Devices from this one on have memory pools.
constexpr int kFirstWithPools = 32;

// Objects that exist now.
struct Live {
  int64_t blocks = 0, bytes = 0;
  int64_t streams = 0, events = 0, graphs = 0;
};
Live GetLive();

// Calls since the program began.
struct Asked {
  int64_t allocations = 0, copies = 0;
  int64_t waits = 0, device_waits = 0;  // of streams for events; of the host for the device
  // Calls that a runtime would refuse, or worse: copies beyond a block, frees of no block, calls that a capture
  // forbids.
  int64_t wrong = 0;
};
Asked GetAsked();

// Lets the n-th of the next calls that can fail do so, `except` not counted; 0: none.
void FailCall(int n, const std::string& except = "");
// The name of the call that failed; "" as long as none has.
std::string FailedCall();

// Whether the bytes are within one block.
bool IsInBlock(const void* begin, size_t bytes);

// Lets the device do all queued work.
void Finish();

class Stream {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured stream, which no call may disturb as long as this lives.
class Capture {
 public:
  explicit Capture(cudaStream_t stream);
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture();

 private:
  const cudaStream_t stream_;
};

// Fails a test that leaves more or less than what was there before it, or an error or a mode of captures to others.
void CheckTidy(const Live& before, const std::string& where);
// Has every call that an attempt makes fail once, in turn, until one succeeds. An attempt whose call fails has to leave
// nothing, and to say what was wanted: by the call's name. All of these calls have to come, and no others but `except`.
void FailEach(const std::map<std::string, std::string>& wants, const std::function<Status()>& attempt,
              const std::string& except = "");

// Runs on several threads, each with its number, which begin at the same time.
void InThreads(size_t threads, const std::function<Status(size_t thread)>& run);

}  // namespace stof::test::fake
#endif  // STOF_TESTS_CPP_FAKE_CUDA_FAKE_CUDA_H_
