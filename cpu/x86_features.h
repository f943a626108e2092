// SPDX-License-Identifier: Apache-2.0
// What instructions an x86-64 processor and its operating system have.
#ifndef STOF_CPU_X86_FEATURES_H_
#define STOF_CPU_X86_FEATURES_H_

namespace stof {
namespace cpu {

// Asks the processor itself. __builtin_cpu_supports would ask the compiler's run-time library, and that of zig, which
// builds the wheels, answers "none". The names are those of the built-in. False for any other, and on
// other architectures.
bool HasX86Feature(const char* name);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_X86_FEATURES_H_
