// SPDX-License-Identifier: Apache-2.0
// Kernels made for a chain: the source of one, and what a launch of it gets. Plain C++, no CUDA header. A source has no
// word of the description in it: numbers, operators and structure alone are written again from the parsed chain. What
// differs from run to run without another structure, as sizes and strides, the kernel gets as words of its parameter,
// so that one source, and one compiled kernel, serves many shapes.
#ifndef STOF_CUDA_CHAIN_CODEGEN_H_
#define STOF_CUDA_CHAIN_CODEGEN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/chain/chain.h"

namespace stof {
namespace cuda {

constexpr char kChainKernelName[] = "stof_chain";

// The source of a kernel, which begins with the functions that all have.
std::string ChainSource(const std::string& kernel);

struct ChainPlan {
  // words[word] is the address of an input or output, plus offset bytes.
  struct Address {
    int word = 0;
    int index = 0;
    bool output = false;
    int64_t offset = 0;
  };
  std::string kernel;  // its source, without the functions that all have
  std::vector<int64_t> words;
  std::vector<Address> addresses;
  int64_t ctas = 0;
  int threads = 0;
};

// How a chain is laid out on threads. Neighbouring axes that every tensor walks through alike are one here.
struct ChainLayout {
  enum class Along : uint8_t { kFixed, kUnit, kGather };  // a tensor, along the inner axis
  struct Ref {
    int tensor = 0;  // number of the input or output
    DType dtype = DType::kF32;
    Along along = Along::kFixed;
    int width = 1;  // bytes of an access, of kUnit
    bool never = false, once = false;
    int64_t constant = 0;
    int64_t stride[kChainMostAxes] = {};
    uint32_t low = 0, high = 0;  // axes whose first and last positions are not read
    int64_t first[kChainMostAxes] = {}, last[kChainMostAxes] = {};
    std::vector<BoundRead::Part> parts;
    uint32_t axes = 0;  // that it depends on
  };
  int axes = 0;
  int64_t size[kChainMostAxes] = {};
  int of_axis[kChainMostAxes] = {};  // from the chain's axes
  int row = 0;                       // the chain's last axis
  int inner = 0;                     // the one whose neighbours a thread takes
  uint32_t moving = 0;               // axes that differ between the repeats of a thread
  bool reduces = false;              // rows are taken whole, for their sums
  bool streamed = false;             // rows too long for registers, read again for each pass
  bool wide = false;                 // 64-bit indices
  int vector = 1;                    // neighbours that a thread takes
  int repeats = 1;                   // how many times that
  int lanes = 1;                     // threads of a row
  int unrolled = -1;                 // the axis that repeats go along; -1: they are CTAs' widths apart
  int crossed = -1;                  // the axis that neighbouring threads go along, where an input is contiguous there
  std::vector<Ref> reads, outputs;
  std::vector<uint32_t> node_axes;  // that each node of the chain depends on
};

// False where there is nothing to compute, or only what the interpreting kernel takes: rows without elements.
bool MakeChainLayout(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                     int sm_count, ChainLayout* layout);
// The kernel and all words but the addresses. sm_count: of the device, for the size of CTAs.
void MakeChainPlan(const Chain& chain, const ChainLayout& layout, int sm_count, ChainPlan* plan);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_CODEGEN_H_
