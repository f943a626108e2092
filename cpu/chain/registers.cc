// SPDX-License-Identifier: Apache-2.0
// Register allocation of a program: values and arguments of steps, and their memory in a worker.
#include <algorithm>
#include <cmath>
#include <map>

#include "cpu/chain/compiler.h"

namespace stof {
namespace cpu {

int ChainCompiler::New(ChainRegister::Kind kind) {
  ChainRegister made;
  made.kind = kind;
  p_.registers.push_back(made);
  return static_cast<int>(p_.registers.size()) - 1;
}

int ChainCompiler::Constant(float value) {
  for (size_t i = 0; i < p_.registers.size(); ++i) {
    const ChainRegister& r = p_.registers[i];
    if (r.kind == ChainRegister::Kind::kConstant && std::signbit(r.value) == std::signbit(value) &&
        (r.value == value || (std::isnan(r.value) && std::isnan(value)))) {
      return static_cast<int>(i);
    }
  }
  const int made = New(ChainRegister::Kind::kConstant);
  p_.registers[static_cast<size_t>(made)].value = value;
  return made;
}

bool ChainCompiler::IsSingle(int reg, bool in_row) const {
  const auto kind = p_.registers[static_cast<size_t>(reg)].kind;
  return kind == ChainRegister::Kind::kConstant || (!in_row && kind == ChainRegister::Kind::kRow);
}

void ChainCompiler::SetArguments(const int* from, bool in_row, ChainStep* step) const {
  int16_t* const arg[3] = {&step->a, &step->b, &step->c};
  for (int i = 0; i < 3; ++i) {
    if (from[i] < 0) continue;
    *arg[i] = static_cast<int16_t>(from[i]);
    if (IsSingle(from[i], in_row)) step->mask |= static_cast<uint8_t>(1 << i);
  }
}

// Reuses the memory of strips that are no longer live: all live strips should fit the L1 cache.
void ChainCompiler::Reuse(std::vector<ChainStep>* element) {
  std::vector<ChainStep>& steps = *element;
  std::map<int, size_t> last;
  for (size_t i = 0; i < steps.size(); ++i) {
    for (int reg : {steps[i].a, steps[i].b, steps[i].c, steps[i].dst}) {
      if (reg >= 0) last[reg] = i;
    }
  }
  std::vector<int> free;
  std::map<int, int> slot;
  const auto is_strip = [this](int reg) {
    return reg >= 0 && p_.registers[static_cast<size_t>(reg)].kind == ChainRegister::Kind::kStrip;
  };
  int used = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    // Arguments that end here first: a step may write over them, element by element.
    for (int reg : {steps[i].a, steps[i].b, steps[i].c}) {
      if (is_strip(reg) && last[reg] == i && slot.count(reg) != 0 && slot[reg] >= 0) {
        free.push_back(slot[reg]);
        slots_[static_cast<size_t>(reg)] = slot[reg];
        slot[reg] = -1;
      }
    }
    const int dst = steps[i].dst;
    if (!is_strip(dst)) continue;
    if (free.empty()) free.push_back(used++);
    slot[dst] = free.back();
    slots_.resize(p_.registers.size(), -1);
    slots_[static_cast<size_t>(dst)] = slot[dst];
    free.pop_back();
    if (last[dst] == i) free.push_back(slot[dst]);
  }
  strips_ = std::max(strips_, used);
}

// Memory of a worker.
void ChainCompiler::Place() {
  slots_.resize(p_.registers.size(), -1);
  const int64_t strip = (p_.batch > 1 ? p_.batch * bound_.n : p_.strip) + 16;
  const int64_t whole = (p_.batch > 1 ? p_.batch * bound_.n : bound_.n) + 16;
  const auto round = [](int64_t floats) { return (floats + 15) / 16 * 16; };
  // Not a multiple of 4 KiB apart, where loads would wait for stores to the same place in a page.
  const int64_t pitch = round(strip) + 16;
  p_.floats = strips_ * pitch;
  for (size_t i = 0; i < p_.registers.size(); ++i) {
    ChainRegister& r = p_.registers[i];
    int64_t size = 0;
    switch (r.kind) {
      case ChainRegister::Kind::kConstant:
        continue;
      case ChainRegister::Kind::kStrip:
        r.offset = std::max(0, slots_[i]) * pitch;
        continue;
      case ChainRegister::Kind::kRow:
        size = p_.batch;
        break;
      case ChainRegister::Kind::kOutput:
        size = strip;
        break;
      default:
        size = whole;
    }
    r.offset = p_.floats;
    p_.floats += round(size) + 16;
    if (r.kind != ChainRegister::Kind::kRow) p_.moving.push_back(static_cast<int16_t>(i));
  }
  if (strips_ == 0) p_.floats += pitch;
}

}  // namespace cpu
}  // namespace stof
