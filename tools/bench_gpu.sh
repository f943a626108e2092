#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU's grids and models in one go, on a machine with a GPU, torch, and ONNX Runtime with its CUDA provider:
#   tools/bench_gpu.sh LIBRARY [RESULTS [SECONDS]]
# LIBRARY is libstof_ort.so with CUDA kernels; RESULTS (docs/results/h100) takes the JSON files; no point of the attention
# grids is begun after SECONDS (200). Models are timed where their graphs were prepared before, without a GPU:
#   python -m bench model NAME --prepare --prepared build/bench --batch B --lengths S
# Afterwards, anywhere: python -m bench plot RESULTS; python -m bench table -o docs/reference/numbers.md
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
library=${1:?the path of libstof_ort.so}
results=${2:-$here/docs/results/h100}
seconds=${3:-200}
prepared=${STOF_PREPARED:-$here/build/bench}
export STOF_LIBRARY=$library PYTHONPATH=$here/optimizer${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cd "$here" || exit 1
mkdir -p "$results"
status=0
: > "$results/bench_gpu.log"
# What hangs must not take the rest along: the limit is for points, this one is for the whole.
if [ "$seconds" -gt 0 ]; then
  timeout $((seconds + 60)) python3 -m bench attention --device cuda --grid masks paper decode long bits --again 2 --limit "$seconds" \
    --results "$results" 2>&1 | tee -a "$results/bench_gpu.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
fi
for folder in "$prepared"/*-[0-9]*-[0-9]*; do
  [ -d "$folder" ] || continue
  name=$(basename "$folder")
  length=${name##*-} rest=${name%-*}
  timeout 90 python3 -m bench model "${rest%-*}" --device cuda --batch "${rest##*-}" --lengths "$length" \
    --prepared "$prepared" --results "$results" 2>&1 | tee -a "$results/bench_gpu.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
done
exit $status
