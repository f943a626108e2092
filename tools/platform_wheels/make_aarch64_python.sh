#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: make_aarch64_python.sh FOLDER
# Makes a Python for 64-bit Arm that QEMU runs: FOLDER/root has Debian's packages, unpacked and not installed, and FOLDER/env
# the environment, whose bin/python starts the emulator. Child processes that Python starts by sys.executable run likewise.
# Uses the Debian release of this machine. STOF_QEMU may name another emulator, QEMU_CPU a processor of it.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
qemu=${STOF_QEMU:-qemu-aarch64-static}
for tool in "$qemu" apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "make_aarch64_python.sh: no $tool; apt-get install qemu-user-static on Debian" >&2; exit 1; }
done
root=$folder/root env=$folder/env

if [ ! -e "$folder/root.done" ]; then
  # Private lists and cache: the machine's own package tool does not learn of another architecture.
  rm -rf "$root" "$folder/apt"
  mkdir -p "$root" "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/apt/state"
  : >"$folder/apt/status"
  apt_arm() {
    apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$folder/apt/state" -o Dir::State::lists="$folder/apt/lists" \
      -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
  }
  apt_arm update >"$folder/apt/log" 2>&1 || { cat "$folder/apt/log" >&2; exit 1; }
  apt_arm install -y --no-install-recommends --download-only python3 libstdc++6 >>"$folder/apt/log" 2>&1 || {
    cat "$folder/apt/log" >&2
    exit 1
  }
  for package in "$folder"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$root"
  done
  # ONNX Runtime reads the processors from this file, and ends where it finds those of x86-64: a Neoverse N1 for each.
  mkdir -p "$root/proc"
  for ((i = 0; i < $(nproc); ++i)); do
    printf 'processor\t: %d\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\n' $i
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
  done >"$root/proc/cpuinfo"
  touch "$folder/root.done"
fi

interpreter=$(ls "$root"/usr/bin/python3.[0-9]* | head -n 1)
version=$(basename "$interpreter")
site=$env/lib/$version/site-packages
mkdir -p "$env/bin" "$site"
printf 'home = %s\ninclude-system-site-packages = false\n' "$root/usr/bin" >"$env/pyvenv.cfg"
# The name that the emulator gives the program is that of this script: Python finds the environment, and itself, by it.
printf '#!/bin/sh\nexec "%s" -0 "%s" -L "%s" "%s" "$@"\n' "$qemu" "$env/bin/python" "$root" "$interpreter" >"$env/bin/python"
chmod +x "$env/bin/python"
"$env/bin/python" -c 'import platform; assert platform.machine() == "aarch64"'
