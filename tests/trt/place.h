// SPDX-License-Identifier: Apache-2.0
// Where the tensors of the tests are: in the host's memory beside fake_backend.cc, on a GPU beside the kernels
// (place_host.cc, place_cuda.cc).
#ifndef STOF_TESTS_TRT_PLACE_H_
#define STOF_TESTS_TRT_PLACE_H_

#include <NvInferRuntime.h>

#include <cstddef>
#include <memory>

namespace stof::test {

// The calling thread's last calls of the backend.
struct Seen {
  int attentions = 0;
  int readies = 0;
  int kernel = -1;
  void* stream = nullptr;
  size_t allocated = 0;
  // Graphs: whether they can be captured and replayed, and how often they were.
  bool can_capture = false, can_replay = false, busy = false;
  bool is_capturing = false;  // a host captures the stream
  int captured = 0, replayed = 0, dropped = 0;
};
// nullptr: the backend is the real one, which counts nothing.
Seen* LastSeen();

// Memory for a plugin of exactly so many bytes, at a multiple of 64 and no more, all of them poisoned; a write beside
// it shows, on the host under AddressSanitizer.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&&) = delete;
  void* address() const { return address_; }  // what a plugin gets
  char* host() const { return host_; }        // the same where there is no GPU
  // Wait for the stream.
  void Upload(cudaStream_t stream) const;
  void Download(cudaStream_t stream) const;  // fails where something was written beside the memory

 private:
  size_t bytes_;
  char* host_ = nullptr;
  void* address_ = nullptr;
};

// Of the calling thread; it lives as long as the process.
cudaStream_t ThreadStream();

}  // namespace stof::test
#endif  // STOF_TESTS_TRT_PLACE_H_
