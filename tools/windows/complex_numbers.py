# SPDX-License-Identifier: Apache-2.0
"""Gives a Windows Python under Wine the functions of complex numbers that Wine's C runtime lacks.

``python complex_numbers.py FOLDER``: FOLDER/cp312 is the Python, FOLDER/site has its packages. A library takes the place of
``api-ms-win-crt-math-l1-1-0.dll``: it has these functions, and passes all others on. Wine knows that name itself, so that the
packages get another one, of the same length.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pefile

_SYSTEM, _OWN = "api-ms-win-crt-math-l1-1-0.dll", "own-ms-win-crt-math-l1-1-0.dll"
_UNARY = ("exp", "sin", "cos", "tan", "sinh", "cosh", "tanh", "log", "sqrt")
_HEAD = """
#include <complex.h>
typedef struct { float r, i; } F;
typedef struct { double r, i; } D;
static float complex cf(F x) { return x.r + x.i * I; }
static double complex cd(D x) { return x.r + x.i * I; }
static F pf(float complex x) { F y = {crealf(x), cimagf(x)}; return y; }
static D pd(double complex x) { D y = {creal(x), cimag(x)}; return y; }
"""


def imported_names(folder: Path) -> set[str]:
    """What the packages' libraries import from the C runtime's functions of numbers."""
    names: set[str] = set()
    for path in (*folder.rglob("*.pyd"), *folder.rglob("*.dll")):
        library = pefile.PE(str(path), fast_load=True)
        library.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
        for entry in getattr(library, "DIRECTORY_ENTRY_IMPORT", ()):
            if entry.dll.decode().lower() in (_SYSTEM, _OWN):
                names |= {i.name.decode() for i in entry.imports}
    return names


def definitions() -> dict[str, str]:
    """Functions in C by the names that they are exported under. Windows' long double is a double."""
    functions = {}
    for end, kind, real, complex_of, plain in (
        ("f", "F", "float", "cf", "pf"),
        ("", "D", "double", "cd", "pd"),
        ("l", "D", "double", "cd", "pd"),
    ):
        inner = "" if end == "l" else end
        functions[f"creal{end}"] = f"{real} my_creal{end}({kind} x) {{ return x.r; }}"
        functions[f"cimag{end}"] = f"{real} my_cimag{end}({kind} x) {{ return x.i; }}"
        for name in ("carg", "cabs"):
            functions[f"{name}{end}"] = f"{real} my_{name}{end}({kind} x) {{ return {name}{inner}({complex_of}(x)); }}"
        for name in (f"c{u}" for u in _UNARY):
            body = f"return {plain}({name}{inner}({complex_of}(x)));"
            functions[f"{name}{end}"] = f"{kind} my_{name}{end}({kind} x) {{ {body} }}"
        body = f"return {plain}(cpow{inner}({complex_of}(x), {complex_of}(y)));"
        functions[f"cpow{end}"] = f"{kind} my_cpow{end}({kind} x, {kind} y) {{ {body} }}"
    return functions


def main() -> None:
    """Builds the library and renames it in the packages."""
    root = Path(sys.argv[1])
    names, functions = imported_names(root / "site"), definitions()
    own = sorted(names & functions.keys())
    (root / "complex.c").write_text(_HEAD + "\n".join(functions[n] for n in own), encoding="ascii")
    exports = [f"  {n} = {'my_' if n in own else 'ucrtbase.'}{n}" for n in sorted(names)]
    (root / "complex.def").write_text("\n".join([f'LIBRARY "{_OWN}"', "EXPORTS", *exports, ""]), encoding="ascii")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-shared", "-O1", "-fno-builtin"]
    subprocess.run(
        [*command, "-o", str(root / "cp312" / _OWN), str(root / "complex.c"), str(root / "complex.def")], check=True
    )
    for path in (*(root / "site").rglob("*.pyd"), *(root / "site").rglob("*.dll")):
        data = path.read_bytes()
        if (renamed := data.replace(_SYSTEM.encode(), _OWN.encode())) != data:
            path.write_bytes(renamed)


if __name__ == "__main__":
    main()
