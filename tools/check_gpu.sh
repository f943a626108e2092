#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks of the CUDA kernels on a machine with a GPU, most important first:
#   tools/check_gpu.sh [FOLDER [SECONDS [LOGS]]]
# FOLDER (build/cuda/tests/cpp) has stof_cuda_tests; nothing is begun after SECONDS (300 on 16 cores, more on fewer); LOGS (a
# temporary folder) takes the output of each suite. Prints a line a suite and the first failing cases, and ends with an error
# unless all passed. What takes a suite's time is the definition in fp64 on the CPU, so that a wave runs as many suites side by
# side as there are cores. STOF_CHECK_WAVES=1 takes the first wave alone, "1 2" both that need no sanitizer. One case again:
# STOF_CASE=its seed and the settings that stand in the line.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(cd "${1:-$here/build/cuda/tests/cpp}" && pwd) || exit 2
cores=$(nproc)
seconds=${2:-$((cores < 16 ? 300 * 16 / cores : 300))}
logs=${3:-$(mktemp -d)}
tests=$folder/stof_cuda_tests
[ -x "$tests" ] || { echo "no stof_cuda_tests in $folder: build the preset cuda" >&2; exit 2; }
mkdir -p "$logs"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
# Where CUDA or a Python package of it lies.
cublaslt=${STOF_CUBLASLT:-$(ls /usr/local/cuda/lib64/libcublasLt.so.1[23] "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)"/*/lib/libcublasLt.so.1[23] 2>/dev/null | head -1)}
waves=${STOF_CHECK_WAVES:-1 2 3}
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)
begin=$(date +%s)
names=() limits=() failed=0 total=0

# suite NAME LIMIT PART [VARIABLE=VALUE | sanitizer's TOOL]...: begins one in the background, once a core is free.
suite() {
  local name=$1 limit=$2 part=$3 left
  shift 3
  while [ "$(jobs -pr | wc -l)" -ge "$cores" ]; do wait -n; done
  left=$((seconds - $(date +%s) + begin))
  local settings=() command=("$tests" "$part")
  for word in "$@"; do
    case $word in
      *=*) settings+=("$word") ;;
      *) command=("$sanitizer" --tool "$word" --error-exitcode 9 --print-limit 3 "$tests" "$part") ;;
    esac
  done
  [ "$left" -lt "$limit" ] && limit=$left
  names+=("$name") limits+=("$limit")
  total=$((total + 1))
  if [ "$limit" -lt 5 ]; then
    echo "no time was left" > "$logs/$name.log"
    echo 77 > "$logs/$name.rc"
    return
  fi
  {
    env "${settings[@]}" timeout -k 5 "$limit" "${command[@]}" > "$logs/$name.log" 2>&1
    echo $? > "$logs/$name.rc"
  } &
}

# Waits for what was begun and prints it.
report() {
  wait
  local i name code verdict
  for i in "${!names[@]}"; do
    name=${names[$i]} code=$(cat "$logs/${names[$i]}.rc")
    case $code in
      0) verdict=pass ;;
      77) verdict="NOT RUN" ;;
      124 | 137) verdict="NO END in ${limits[$i]} s" ;;
      *) verdict="FAIL ($code)" ;;
    esac
    [ "$code" -eq 0 ] || failed=$((failed + 1))
    printf '%-28s %-16s %s\n' "$name" "$verdict" "$(awk '/ cases +[0-9.]+ s / {c += $2; s += $4} END {printf "%d cases, %.1f s", c, s}' "$logs/$name.log")"
    if [ "$code" -ne 0 ]; then grep -v ' ok$' "$logs/$name.log" | head -12 | cut -c1-420 | sed 's/^/    /'; fi
  done
  names=() limits=()
  echo "-- $(($(date +%s) - begin)) s, $failed of $total failed"
}

wave() { [[ " $waves " == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,compute_cap,power.limit --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
if wave 1; then
  suite table 75 CudaAttentionEquals
  suite table-8.0 75 CudaAttentionEquals STOF_CUDA_CAPABILITY=80
  suite table-8.0-128-rows 75 CudaAttentionEquals STOF_CUDA_CAPABILITY=80 STOF_CUDA_SM80_ROWS=128
  suite decode 75 CudaDecode
  suite decode-8.0 75 CudaDecode STOF_CUDA_CAPABILITY=80
  suite append 75 CudaAppend
  suite cached 200 CudaCachedAttention
  suite cached-8.0 200 CudaCachedAttention STOF_CUDA_CAPABILITY=80
  suite packed 150 CudaAttentionOfPackedSequences
  suite packed-8.0 150 CudaAttentionOfPackedSequences STOF_CUDA_CAPABILITY=80
  suite packed-edges 75 CudaPackedSequences
  suite key-columns 150 CudaKeyColumns
  suite key-columns-8.0 150 CudaKeyColumns STOF_CUDA_CAPABILITY=80
  suite skip-scores 200 CudaSkipScores
  suite choose-blocks 200 CudaChooseBlocks
  suite choose-pages 200 CudaChoosePages
  suite choose-pages-8.0 200 CudaChoosePages STOF_CUDA_CAPABILITY=80
  suite page-choice 150 CudaPageChoice
  suite page-scores 150 CudaPageScores
  suite paged 150 CudaPagedAttention
  suite quantized-caches 150 CudaQuantizedCaches
  suite int8-attention 150 CudaInt8Attention
  suite int8-attention-8.0 150 CudaInt8Attention STOF_CUDA_CAPABILITY=80
  suite int8-attention-8.0-128-rows 150 CudaInt8Attention STOF_CUDA_CAPABILITY=80 STOF_CUDA_SM80_ROWS=128
  suite relative 150 CudaRelative
  suite relative-128-rows 150 CudaRelative STOF_CUDA_SM80_ROWS=128
  suite relative-8.0 150 CudaRelative STOF_CUDA_CAPABILITY=80
  suite fp32 75 CudaFp32
  suite fp32-128-rows 75 CudaFp32 STOF_CUDA_FP32_ROWS=128
  suite tf32-128-rows 75 CudaTf32 STOF_CUDA_FP32_ROWS=128
  suite tf32 75 CudaTf32
  suite rows 75 CudaRowsEqual
  suite sparse-mlp 75 CudaSparseMlp
  suite gemm 150 CudaGemm
  suite gemm-8.0 150 CudaGemm STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  suite transposed-gemm 150 CudaTransposedGemm
  suite transposed-gemm-8.0 150 CudaTransposedGemm STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  if [ -n "$cublaslt" ]; then
    suite gemm-cublaslt 75 CudaGemmPlain STOF_CUDA_GEMM=cublaslt STOF_CUBLASLT="$cublaslt"
  else
    echo "no libcublasLt.so.12 or .13: matrix products by it are not run"
  fi
  if [ "$capability" = 9.0 ]; then
    for kernel in 0 1 2 3 4; do suite "gemm-9.0-kernel-$kernel" 150 CudaGemmEquals STOF_CUDA_GEMM=$kernel; done
    for kernel in 0 1 2 3 4; do suite "gemm-9.0-waves-$kernel" 150 CudaGemmPlainWaves STOF_CUDA_GEMM=$kernel; done
    for kernel in 5 6 7; do  # pairs have none of these
      suite "gemm-9.0-kernel-$kernel" 150 CudaGemmPlain STOF_CUDA_GEMM=$kernel
    done
    for kernel in 0 1 2 3 4 5 6 7 8 9; do suite "9.0-kernel-$kernel" 150 CudaAttentionSm90 STOF_CUDA_KERNEL=$kernel; done
    # Small problems use half tiles where a kernel can, and their inputs are in L2: whole tile rows, and prefetched inputs.
    for kernel in 0 1 2 4 6; do
      suite "9.0-kernel-$kernel-whole" 150 CudaAttentionSm90 STOF_CUDA_KERNEL=$kernel STOF_CUDA_HALVES=0 STOF_CUDA_COLD=1 STOF_SAMPLE=3
    done
    suite skip-scores-whole 200 CudaSkipScores STOF_CUDA_HALVES=0
    for kernel in 3 5 7 8 9; do
      suite "9.0-kernel-$kernel-cold" 150 CudaAttentionSm90 STOF_CUDA_KERNEL=$kernel STOF_CUDA_COLD=1 STOF_SAMPLE=3
    done
    # Few SMs have tile rows enough for dynamic scheduling.
    for count in 1 5; do
      suite "9.0-kernel-4-dynamic-$count" 150 CudaAttentionSm90 STOF_CUDA_KERNEL=4 STOF_CUDA_MULTIPROCESSORS=$count
    done
    suite 9.0-dynamic 75 CudaDynamic
    suite 9.0-kernel-1-paired 150 CudaAttentionSm90 STOF_CUDA_KERNEL=1 STOF_CUDA_MULTIPROCESSORS=3 STOF_SAMPLE=3
    suite 9.0-splits 150 CudaSplitsSm90
    for kernel in 0 1; do suite "9.0-score-mod-$kernel" 150 CudaScoreModSm90 STOF_CUDA_KERNEL=$kernel; done
  else
    echo "compute capability ${capability:-unknown}: the kernels for 9.0 are not run"
  fi
  suite masks 75 CudaMasksEqual
  suite masks-usual 75 CudaMasksOf
  suite masks-by-distance 75 CudaMasksByDistance
  suite masks-captured 75 CudaMasksInCaptured
  if [ "$capability" = 9.0 ]; then
    for kernel in 1 2; do suite "masks-captured-$kernel" 75 CudaMasksInCaptured STOF_CUDA_KERNEL=$kernel; done
  fi
  suite masks-broken 75 CudaVectors
  suite no-keys 75 CudaWithoutKeys
  suite chains-interpreted 150 Chain STOF_CHAIN_KERNELS=interpret
  # Compiling takes the time: 8 processes share the cases.
  for shard in 0 1 2 3 4 5 6 7; do
    suite "chains-$shard" 150 Chain STOF_SHARD=$shard/8 STOF_CHAIN_KERNELS=made STOF_CHAIN_CACHE="$logs/chains"
  done
  suite non-finite 75 CudaNonFinite
  suite padding 75 CudaPadding
  report
fi
if wave 2; then
  suite large-scores 75 CudaScoresOfAnySize
  suite large-scores-8.0 75 CudaScoresOfAnySize STOF_CUDA_CAPABILITY=80
  [ "$capability" = 9.0 ] && suite 9.0-large-scores 100 CudaSm90ScoresOfAnySize
  suite repeats 75 CudaRepeats
  suite no-memory 45 CudaRuns
  suite cache 45 CudaMaskCache
  suite fp32-99-KiB 45 CudaFp32 STOF_CUDA_SHARED_KIB=99 STOF_SAMPLE=2
  suite relative-99-KiB 60 CudaRelativeTermsOfEveryHead STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=99
  suite relative-163-KiB 60 CudaRelativeTermsOfEveryHead STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=163
  suite fp32-160-KiB 45 CudaFp32 STOF_CUDA_SHARED_KIB=160 STOF_SAMPLE=3
  suite table-8.0-99-KiB 45 CudaAttentionEquals STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=99
  suite table-8.0-163-KiB 45 CudaAttentionEquals STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=163
  suite int8-attention-8.0-99-KiB 45 CudaInt8Attention STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=99
  suite non-finite-8.0 45 CudaNonFinite STOF_CUDA_CAPABILITY=80
  suite masks-captured-8.0 45 CudaMasksInCaptured STOF_CUDA_CAPABILITY=80
  report
fi
if wave 3 && [ -n "$sanitizer" ]; then
  suite memcheck-decode 80 CudaDecode memcheck STOF_SAMPLE=9
  suite memcheck-append 80 CudaAppend memcheck STOF_SAMPLE=5
  suite memcheck-cached 80 CudaCachedAttention memcheck STOF_SAMPLE=9
  suite racecheck-append 80 CudaAppend racecheck STOF_SAMPLE=17
  suite memcheck-packed 80 CudaAttentionOfPackedSequences memcheck STOF_SAMPLE=9
  suite memcheck-packed-edges 80 CudaPackedSequences memcheck
  suite racecheck-packed-8.0 80 CudaAttentionOfPackedSequences racecheck STOF_SAMPLE=17 STOF_CUDA_CAPABILITY=80
  [ "$capability" = 9.0 ] && suite memcheck-9.0 80 CudaAttentionSm90 memcheck STOF_CUDA_COLD=1 STOF_SAMPLE=13
  [ "$capability" = 9.0 ] && suite memcheck-9.0-drawn 80 CudaAttentionSm90 memcheck STOF_CUDA_KERNEL=4 STOF_CUDA_MULTIPROCESSORS=2 STOF_SAMPLE=9
  [ "$capability" = 9.0 ] && suite memcheck-9.0-splits 80 CudaSplitsSm90 memcheck STOF_CUDA_COLD=1 STOF_SAMPLE=7
  [ "$capability" = 9.0 ] && suite memcheck-9.0-score-mod 80 CudaScoreModSm90 memcheck STOF_CUDA_COLD=1 STOF_SAMPLE=41
  suite memcheck-table 80 CudaAttentionEquals memcheck STOF_SAMPLE=9
  suite memcheck-8.0 80 CudaAttentionEquals memcheck STOF_SAMPLE=9 STOF_CUDA_CAPABILITY=80
  suite memcheck-8.0-128-rows 80 CudaAttentionEquals memcheck STOF_SAMPLE=17 STOF_CUDA_CAPABILITY=80 STOF_CUDA_SM80_ROWS=128
  suite memcheck-8.0-99-KiB 80 CudaAttentionEquals memcheck STOF_SAMPLE=17 STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=99
  [ "$capability" = 9.0 ] && suite memcheck-choose-blocks 80 CudaChooseBlocksEquals memcheck STOF_SAMPLE=9
  suite memcheck-choose-pages 80 CudaChoosePagesEquals memcheck STOF_SAMPLE=9
  suite memcheck-relative 80 CudaRelativeTermsEqual memcheck STOF_SAMPLE=13
  suite memcheck-relative-128-rows 80 CudaRelativeTermsEqual memcheck STOF_SAMPLE=29 STOF_CUDA_SM80_ROWS=128
  suite racecheck-relative 80 CudaRelativeTermsEqual racecheck STOF_SAMPLE=61
  suite memcheck-fp32 80 CudaFp32 memcheck STOF_SAMPLE=11
  suite memcheck-tf32 80 CudaTf32 memcheck STOF_SAMPLE=21
  suite memcheck-rows 80 CudaRowsEqual memcheck STOF_SAMPLE=23
  suite memcheck-gemm 80 CudaGemmEquals memcheck STOF_SAMPLE=5 STOF_CUBLASLT=0 STOF_GEMM_TIMING=0
  suite memcheck-gemm-8.0 80 CudaGemmEquals memcheck STOF_SAMPLE=5 STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  suite memcheck-transposed-gemm 80 CudaTransposedGemmSizes memcheck STOF_SAMPLE=7 STOF_CUBLASLT=0 STOF_GEMM_TIMING=0
  suite memcheck-transposed-gemm-8.0 80 CudaTransposedGemmSizes memcheck STOF_SAMPLE=7 STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  suite memcheck-transposed-gemm-unaligned 80 CudaTransposedGemmWithoutVectors memcheck STOF_SAMPLE=7
  suite memcheck-sparse-mlp 80 CudaSparseMlpRandom memcheck STOF_SAMPLE=3 STOF_CUBLASLT=0
  suite racecheck-sparse-mlp 80 CudaSparseMlpRandom racecheck STOF_SAMPLE=9 STOF_CUBLASLT=0
  suite memcheck-masks 80 CudaMasksOf memcheck
  suite memcheck-masks-by-distance 80 CudaMasksByDistance memcheck
  suite racecheck-masks-by-distance 80 CudaMasksByDistance racecheck
  suite memcheck-masks-captured 80 CudaMasksInCaptured memcheck
  suite memcheck-chains 80 ChainNorms memcheck STOF_SHARD=5/24 STOF_CHAIN_CACHE="$logs/chains"
  suite memcheck-chains-random 80 ChainRandom memcheck STOF_SHARD=3/16 STOF_CHAIN_CACHE="$logs/chains"
  suite memcheck-chains-interpreted 80 ChainRandom memcheck STOF_CHAIN_KERNELS=interpret
  suite racecheck-chains 80 ChainNorms racecheck STOF_SHARD=5/24 STOF_CHAIN_CACHE="$logs/chains"
  suite racecheck-chains-interpreted 80 ChainNorms racecheck STOF_CHAIN_KERNELS=interpret
  # Not of the 9.0 kernels: racecheck does not see what orders them (docs/design/attention-cuda.md, "Checked").
  suite racecheck-8.0 80 CudaAttentionEquals racecheck STOF_SAMPLE=37 STOF_CUDA_CAPABILITY=80
  suite racecheck-8.0-128-rows 80 CudaAttentionEquals racecheck STOF_SAMPLE=61 STOF_CUDA_CAPABILITY=80 STOF_CUDA_SM80_ROWS=128
  suite racecheck-8.0-99-KiB 80 CudaAttentionEquals racecheck STOF_SAMPLE=61 STOF_CUDA_CAPABILITY=80 STOF_CUDA_SHARED_KIB=99
  suite racecheck-gemm-8.0 80 CudaGemmEquals racecheck STOF_SAMPLE=11 STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  suite racecheck-transposed-gemm-8.0 80 CudaTransposedGemmSizes racecheck STOF_SAMPLE=11 STOF_CUDA_CAPABILITY=80 STOF_CUBLASLT=0
  suite racecheck-decode 80 CudaDecode racecheck STOF_SAMPLE=61
  suite racecheck-fp32 80 CudaFp32 racecheck STOF_SAMPLE=41
  suite racecheck-rows 80 CudaRowsEqual racecheck STOF_SAMPLE=61
  report
elif wave 3; then
  echo "no compute-sanitizer: memcheck and racecheck not run"
  failed=$((failed + 1))
fi
echo "logs in $logs"
[ "$failed" -eq 0 ]
