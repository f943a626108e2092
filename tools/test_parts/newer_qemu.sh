#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: newer_qemu.sh FOLDER
# Puts the emulator of Debian 12's backports (QEMU 10.0) into FOLDER, unpacked and not installed, and prints its path. Debian 12
# itself has QEMU 7.2, which knows no Neoverse V1. Other systems have a newer one, or have to get one.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
qemu=$folder/root/usr/bin/qemu-aarch64
if [ ! -x "$qemu" ]; then
  . /etc/os-release
  [ "${VERSION_CODENAME:-}" = bookworm ] || { echo "newer_qemu.sh: this is ${PRETTY_NAME:-unknown}, not Debian 12" >&2; exit 1; }
  # Private lists and cache: the machine's own package tool does not learn of the backports.
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  address=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $address bookworm-backports main" >"$folder/sources.list"
  private=(-q -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$folder/lists"
    -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  {
    apt-get "${private[@]}" update
    (cd "$folder" && apt-get "${private[@]}" download qemu-user)
  } >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
  dpkg-deb -x "$folder"/qemu-user_*.deb "$folder/root"
  rm -f "$folder"/qemu-user_*.deb
fi
echo "$qemu"
