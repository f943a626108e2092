#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: fetch_debian_headers.sh DIR
# Unpacks Debian 13's libonnxruntime-dev (headers, 85 kB) into DIR. Installs nothing and changes no system file: the
# archive that this machine is set up with is read through private apt lists, also on another Debian release.
set -euo pipefail
target=$1
for tool in apt-get dpkg dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "this machine has no $tool"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
  awk '$2 !~ /-/ && !seen {print $1; seen = 1}')
key=$(dpkg -L debian-archive-keyring 2>/dev/null | awk '/debian-archive-keyring\.(gpg|pgp)$/ && !seen {print; seen = 1}')
[ -n "$uri" ] && [ -n "$key" ] || { echo "no configured package archive, or no debian-archive-keyring"; exit 1; }
echo "deb [signed-by=$key] $uri trixie main" >"$work/trixie.list"
apt_private() {
  apt-get -q -o Dir::Etc::sourcelist="$work/trixie.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/lists" \
    -o Dir::Cache="$work/cache" -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@"
}
apt_private update
(cd "$work" && apt_private download libonnxruntime-dev)
mkdir -p "$target"
dpkg-deb -x "$work"/libonnxruntime-dev_*.deb "$target"
