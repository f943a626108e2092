# SPDX-License-Identifier: Apache-2.0
"""``stof.optimize``: models in files and in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import onnx

from stof.api.in_memory import is_model, optimize_model
from stof.arguments.checks import check_path
from stof.errors import ArgumentError
from stof.options import Options, PathLike, merge_options
from stof.pipeline import optimize as optimize_file
from stof.report import Report

if TYPE_CHECKING:
    from typing import Unpack

    import onnx_ir

    from stof.options import OptionArguments

Model = TypeVar("Model", onnx.ModelProto, "onnx_ir.Model")


@overload
def optimize(
    model: Model, output: PathLike, options: Options | None = None, **arguments: Unpack[OptionArguments]
) -> Report: ...


@overload
def optimize(
    model: Model,
    output: None = None,
    options: Options | None = None,
    *,
    return_report: Literal[False] = False,
    **arguments: Unpack[OptionArguments],
) -> Model: ...


@overload
def optimize(
    model: Model,
    output: None = None,
    options: Options | None = None,
    *,
    return_report: Literal[True],
    **arguments: Unpack[OptionArguments],
) -> tuple[Model, Report]: ...


# The last one: where protobuf has no types, type checkers take a ModelProto for a path, too.
@overload
def optimize(
    model: PathLike,
    output: PathLike | None = None,
    options: Options | None = None,
    **arguments: Unpack[OptionArguments],
) -> Report: ...


def optimize(
    model: object,
    output: PathLike | None = None,
    options: Options | None = None,
    *,
    return_report: bool = False,
    **arguments: Any,
) -> object:
    """Makes an equivalent model with sparse attention, in a file or in memory.

    Args:
        model: a path of an ONNX file, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. It is never modified. External data
            of a file lies beside it; that of a ModelProto has to be loaded; that of an ``onnx_ir.Model`` is read.
        output: the file to write. By default ``<name>.stof.onnx`` beside an input file, and none for a model in memory.
            When there is nothing to replace, a file that is named here or in ``options`` becomes a copy of the input, and
            the default one is not written. ``options.dry_run`` writes neither.
        options: see :class:`stof.Options`.
        return_report: of a model in memory without an output, give the report, too.
        **arguments: fields of :class:`stof.Options` by name; each takes the place of that of ``options``.

    Returns:
        The :class:`stof.report.Report`, where a file is given or named as the output. Otherwise a model of the given kind,
        or with ``return_report`` the model and the report. The given model itself, where nothing is replaced. Weights of an
        ``onnx_ir.Model`` that stay as they are are the given model's own tensors.

    Raises:
        ArgumentError: wrong arguments, an output that cannot be written.
        ModelError: the input is no model that can be read, or none that ONNX Runtime can run.
        VerifyError: the result differs from the original; nothing was written but the report of ``options.json``.
    """
    options = merge_options("stof.optimize", options, arguments)
    target = None if output is None else check_path("output", output)
    if isinstance(model, str | os.PathLike):
        if return_report:
            raise ArgumentError("return_report is for models in memory; of a file the report is returned anyway")
        return optimize_file(check_path("model", model), target, options)
    if not is_model(model):
        raise ArgumentError(
            f"the model is of type {type(model).__name__}, expected a path, an onnx.ModelProto or an onnx_ir.Model"
        )
    if options.output is not None and output is None:
        raise ArgumentError("name the output of a model in memory as an argument: stof.optimize(model, path)")
    optimized, report = optimize_model(model, target, options)
    if output is not None:
        return report
    return (optimized, report) if return_report else optimized
