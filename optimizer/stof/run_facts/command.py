# SPDX-License-Identifier: Apache-2.0
"""The command line that gives the same result as a run with some options, for reports."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from stof.options import Options
from stof.selection import EVERY_ATTENTION


def _flag(option: str) -> Callable[[Any], list[str]]:
    return lambda value: [option]


def _with(option: str, value: str) -> list[str]:
    """An option and its value, in one word where the value alone would be read as an option."""
    if not value.startswith("-") or value == "-":
        return [option, value]
    return [f"{option}={value}" if option.startswith("--") else option + value]


def _value(option: str) -> Callable[[Any], list[str]]:
    return lambda value: _with(option, str(value))


def _number(option: str) -> Callable[[float], list[str]]:
    """Of the fewest digits that give the same number."""
    return lambda value: _with(option, short if float(short := f"{value:g}") == value else repr(float(value)))


def _each(option: str) -> Callable[[Iterable[Any]], list[str]]:
    return lambda values: [word for value in values for word in _with(option, str(value))]


def _inputs(given: Any) -> list[str]:
    """Inputs that have a name; those of Python have none."""
    named = [given] if isinstance(given, str | os.PathLike) else given
    names = named if isinstance(named, tuple | list) else ()
    return _each("--inputs")(name for name in names if isinstance(name, str | os.PathLike))


def _shapes(ranges: Mapping[str, tuple[int, int]]) -> list[str]:
    return _each("--shape")(f"{n}={low}" if low == high else f"{n}={low}..{high}" for n, (low, high) in ranges.items())


_WRITERS: Mapping[str, Callable[[Any], list[str]]] = {
    "output": _value("-o"),
    "target": _value("--target"),
    "emit": _value("--emit"),
    "capability": lambda value: [],  # has no option
    "allow_tf32": _flag("--allow-tf32"),
    "allow_bf16": _flag("--allow-bf16"),
    "attention_precision": _value("--attention-precision"),
    "max_error": _number("--max-error"),
    "json": _value("--json"),
    "report": _value("--report"),
    "time": _flag("--time"),
    "dry_run": _flag("--dry-run"),
    "explain": lambda pattern: ["--explain"] if pattern == EVERY_ATTENTION else _with("--explain", pattern),
    "verify": _flag("--no-verify"),
    "verify_budget": _number("--verify-budget"),
    "verify_memory": _value("--verify-memory"),
    "memory_limit": _value("--memory-limit"),
    "inputs": _inputs,
    "only": _each("--only"),
    "skip": _each("--skip"),
    "shapes": _shapes,
    "masks": lambda masks: _each("--mask")(f"{site}={text}" for site, text in masks.items()),
    "sparsify": _value("--sparsify"),
    "sparse_mlp": _value("--sparse-mlp"),
    "prompts": _value("--prompts"),
    "max_kl": _number("--max-kl"),
    "min_cosine": _number("--min-cosine"),
    "force": _flag("--force"),
    "dequantize_attention": _flag("--dequantize-attention"),
    "float_model": _value("--float-model"),
    "ignore_empty_rows": lambda value: ["--empty-rows", "ignore"],
    "chains": _value("--chains"),
    "unpad": _value("--unpad"),
    "unpad_capacity": _value("--unpad-capacity"),
    "products": lambda value: ["--products", "off"],
    "tune": _number("--tune"),
    "ignore_measurements": _flag("--ignore-measurements"),
    "plan": _value("--plan"),
    "save_plan": _value("--save-plan"),
}


def command_of(model: str, options: Options) -> str:
    """The command: the model, and each option that is not the default one. Inputs that Python gave are left out.

    Args:
        model: the path of the model or folder.
        options: of the run.
    """
    default = Options()
    words = ["stof-optimize", f".{os.sep}{model}" if model.startswith("-") else model]
    for field in fields(Options):
        value = getattr(options, field.name)
        if not _is_default(value, getattr(default, field.name)):
            words += _WRITERS[field.name](value)
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def _is_default(value: Any, default: Any) -> bool:
    """Whether an option has its default value; arrays of Python cannot be compared, and are none."""
    return type(value) is type(default) and bool(value == default)
