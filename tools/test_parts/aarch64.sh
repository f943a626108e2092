#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C++ tests for AArch64, by a cross compiler and QEMU: aarch64.sh [CPU...]. Every test runs, of random cases a sample:
# an emulator takes about a hundred times as long as a processor. Times that it shows say nothing about kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing=()
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
if [ ${#missing[@]} -gt 0 ]; then
  echo "the tests for AArch64 need a cross compiler and QEMU; install them: apt-get install ${missing[*]}" >&2
  exit 1
fi
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
export STOF_EFFORT=${STOF_EFFORT:-0.04} STOF_SHARD=${STOF_SHARD:-1/16} STOF_SOAK_SECONDS=${STOF_SOAK_SECONDS:-2}

build=build/aarch64
cmake --preset aarch64
cmake --build --preset aarch64 --target stof_tests stof_ort
tests=$build/tests/cpp/stof_tests
ctest --test-dir $build -R one_definition --output-on-failure

# A Cortex-A72 has no dot products and runs the set neon alone; the others have them, max and Neoverse V1 bf16, too.
cpus=("$@")
[ ${#cpus[@]} -gt 0 ] || cpus=(max cortex-a72 cortex-a76 neoverse-n1 neoverse-v1)
qemu=${STOF_QEMU:-qemu-aarch64-static}
has() { grep -qw -- "$1" <<<"$("$qemu" -cpu help || true)"; } # has CPU: the status of help is 1
run() { # run CPU ARGUMENT: the tests of an argument of stof_tests
  "$qemu" -cpu "$1" "$tests" "$2"
}
is_first=true
for cpu in "${cpus[@]}"; do
  if ! has "$cpu"; then
    newer=$(bash tools/test_parts/newer_qemu.sh build/qemu) && qemu=$newer
  fi
  if ! has "$cpu"; then
    echo "== $cpu: not run, $("$qemu" --version | head -1) does not have it; STOF_QEMU names another qemu-aarch64"
    continue
  fi
  echo "== $cpu"
  # Whether dot products and bf16 are detected.
  shown=$(run "$cpu" CpuIsasByName || true)
  echo "$shown"
  found=$(sed -n 's/.*the best set of this machine: //p' <<<"$shown")
  expected=neon_dotprod
  case $cpu in
    cortex-a72) expected=neon ;;
    max | neoverse-v1) expected=neon_bf16 ;;
  esac
  if [ "$found" != $expected ]; then
    echo "$cpu: the best set is ${found:-not known}, expected $expected" >&2
    exit 1
  fi
  if $is_first; then # all tests, in two processes
    run "$cpu" 0/2 >$build/first.log 2>&1 &
    first=$! failed=0
    run "$cpu" 1/2 || failed=1
    wait $first || failed=1
    cat $build/first.log
    [ $failed = 0 ]
    is_first=false
    continue
  fi
  for name in Attention CacheA ChosenPages Skipped ChosenBlocksOf PackedEquals GemmEdges SparseMlpTable Quantized ChainRandom ChainFunctions CpuIsas; do
    run "$cpu" $name
  done
done
