#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/environment.md from the tables of environment variables, of the library and of Python.

Needs a built library (STOF_LIBRARY) and ``optimizer`` on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stof.arguments.environment import VARIABLES, Kind
from stof.runtime.library import environment_variables

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/environment.md"

_BUILDING = (
    ("`CMAKE_ARGS`", "options for CMake in `pip install`, such as `-DSTOF_CUDA=ON`"),
    ("`ONNXRUNTIME_INCLUDE_DIR`", "ONNX Runtime's headers; by default they are found or fetched"),
    (
        "`TENSORRT_INCLUDE_DIR`, `TENSORRT11_INCLUDE_DIR`, `TENSORRT_ROOT`",
        "TensorRT's headers, see [tensorrt.md](../guide/tensorrt.md#build-the-plugin-library)",
    ),
)
# What tests and scripts read: no part of the product, so no table of it has them.
_TESTS = (
    ("`STOF_TEST_ALL`", "tests, `tools/test.sh`", "`1`: the long tests, see [CONTRIBUTING.md](../../CONTRIBUTING.md)"),
    ("`STOF_TEST_TENSORRT`", "tests", "`1`: the tests that need TensorRT"),
    ("`STOF_GENERATED_SEED`", "tests", "the seed of the generated graphs"),
    ("`STOF_CASE`, `STOF_SAMPLE`", "C++ tests on a GPU", "one seed; every n-th case"),
    ("`STOF_SHARD`", "C++ chain tests", "`i/n`: case i and every n-th after it"),
    ("`STOF_EFFORT`", "C++ tests", "above 0, at most 1: the share of random cases; less under an emulator"),
    ("`STOF_SOAK_SECONDS`", "the soak test", "how long it runs"),
    ("`STOF_CHECK_WAVES`", "`tools/check_gpu.sh`", "which waves of suites run"),
    ("`STOF_PREPARED`", "`tools/bench_gpu.sh`", "the folder of prepared models"),
    (
        "`STOF_TRT_ENVIRONMENTS`",
        "`tools/test_parts/engines.sh`, `tools/test_parts/trt_registries.sh`",
        "the folder of their Python environments",
    ),
)
_NOTES = """\
* The library reads a variable once in a process.
* A wrong value is an error that names the variable, the value and the right ones: of the command, and of whoever makes the
  first operator of the library in a process. An empty value counts as unset.
* `STOF_CPU_ISA`, from the least to the best: portable < avx2 < avx_vnni < avx512 < avx512_vnni < avx512_vbmi < avx512_bf16 <
  amx_int8 < amx_bf16, and portable < neon < neon_dotprod < neon_bf16. Each includes those before it, except that
  avx512 and later do not include avx_vnni. `avx512_bf16` needs VBMI.
* The names of kernels in `STOF_CUDA_KERNEL` and `STOF_CUDA_GEMM` are checked when one is chosen.
* The two caches are in `$XDG_CACHE_HOME/stof` where that is set.
* `STOF_TRT_LOG` writes to stderr, one line a message, with names escaped.
* In processes with raised privileges (setuid) the library takes no path from the environment: no NVRTC, cuBLASLt, plugin library
  or chain cache.
* `stof_environment` in the C ABI lists what the library reads, and which are set ([c-api.md](c-api.md))."""


@dataclass(frozen=True)
class _Row:
    name: str
    readers: tuple[str, ...]
    values: str
    help: str
    is_for_users: bool


def _list_words(words: Iterable[str]) -> str:
    """`a`, `b` or `c`."""
    *first, last = [f"`{word}`" for word in words]
    return f"{', '.join(first)} or {last}" if first else last


def _values_of(variable: Mapping[str, Any]) -> str:
    """What a variable of the library may be."""
    kinds = {"word": "", "integer": "an integer", "path": "a path", "name": "a name or number"}
    text = kinds[variable["type"]]
    if variable["type"] == "integer":
        text = f"{variable['least']} to {variable['most']}"
    if words := variable["words"].split():
        text += (" or " if text else "") + _list_words(words)
    return text


def _with_default(values: str, default: str) -> str:
    return f"{values}; default {default}" if default else values


def _rows() -> Iterator[_Row]:
    """The variables of Python, then those of the library, each once."""
    library = {v["name"]: v for v in environment_variables()}
    kinds = {Kind.FLAG: "`0` or `1`", Kind.FILE: "a file", Kind.PATH: "a path"}
    for variable in VARIABLES:
        readers = (variable.reader,)
        if (twin := library.pop(variable.name, None)) is not None:
            readers += (twin["reader"],)
        values = _with_default(kinds[variable.kind], variable.default)
        yield _Row(variable.name, readers, values, variable.help, variable.is_for_users)
    for one in library.values():
        values = _with_default(_values_of(one), one["default"])
        yield _Row(one["name"], (one["reader"],), values, one["help"], one["for_users"])


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *([*row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|" for cells in lines)


def page() -> str:
    """The page's text."""
    rows = list(_rows())
    heads = ("variable", "read by", "values", "meaning")
    users, tests = (
        [(f"`{row.name}`", ", ".join(row.readers), row.values, row.help) for row in rows if row.is_for_users == wanted]
        for wanted in (True, False)
    )
    tests += [(name, reader, "", meaning) for name, reader, meaning in _TESTS]
    return f"""\
<!-- Made by tools/environment_page.py from plugins/core/host/environment.cc and optimizer/stof/arguments/environment.py. -->

# Environment variables

## For users

{_table(heads, users)}

{_NOTES}

## For building

{_table(("variable", "meaning"), _BUILDING)}

## For tests and measurements

They make a large device look like a smaller one, or force a choice. Results stay right; speed does not.

{_table(heads, tests)}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
