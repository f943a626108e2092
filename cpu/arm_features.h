// SPDX-License-Identifier: Apache-2.0
// What instructions an AArch64 processor has.
#ifndef STOF_CPU_ARM_FEATURES_H_
#define STOF_CPU_ARM_FEATURES_H_

namespace stof {
namespace cpu {

// Asks the operating system, as programs on AArch64 have to. Names: neon, dotprod, bf16. False for any other, and on
// other architectures.
bool HasArmFeature(const char* name);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ARM_FEATURES_H_
