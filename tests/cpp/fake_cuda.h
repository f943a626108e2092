// SPDX-License-Identifier: Apache-2.0
// As much of the CUDA runtime as masks and counts ask for, without a device: linked in the place of libcudart. Device
// memory is the host's, so that tests can read it and AddressSanitizer sees who leaves it; fresh memory holds 0xaa.
// Streams do their work when somebody waits for it, as late as a device may.
#ifndef STOF_TESTS_CPP_FAKE_CUDA_H_
#define STOF_TESTS_CPP_FAKE_CUDA_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "plugins/core/contract/status.h"

namespace stof::test::fake {

// What is there now.
struct Live {
  int64_t blocks = 0, bytes = 0;
  int64_t streams = 0, events = 0, graphs = 0;
};
Live GetLive();

// What was asked for since the program began.
struct Asked {
  int64_t allocations = 0, copies = 0, waits = 0;  // waits: of streams for events
  // What a runtime would have refused, or worse: copies beyond a block, what is no block freed, what a capture forbids.
  int64_t wrong = 0;
};
Asked GetAsked();

// Of the calls from now on that can fail, the n-th does, `except` not counted; 0: none.
void FailCall(int n, const std::string& except = "");
// Which call that was; "" as long as none was.
std::string FailedCall();

// Whether all of it lies in one block.
bool IsInBlock(const void* begin, size_t bytes);

// The device does all that it was given.
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

// While it is there a stream is captured, and nobody may disturb that.
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
#endif  // STOF_TESTS_CPP_FAKE_CUDA_H_
