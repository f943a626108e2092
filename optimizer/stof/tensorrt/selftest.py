# SPDX-License-Identifier: Apache-2.0
"""``stof-trt selftest``: small models with every kind of mask, built and run here, against attention in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from stof.attention.checks.reference import Problem, assert_close, random_problem, reference
from stof.attention.function_body import OP, Variant, make_attention_function
from stof.attention.tensorrt_constants import constants_attribute
from stof.errors import StofError
from stof.files import temporary_folder
from stof.graph.index import DOMAIN
from stof.mask.expression import MaskExpression
from stof.mask.site import EmptyRows, Layout, LiftedMask
from stof.tensorrt.build import BuildOptions, build_engine
from stof.tensorrt.device import open_device
from stof.tensorrt.module import Messages, find
from stof.tensorrt.run import Engine
from stof.terminal import say

_OPSET = 18
_B, _H, _S, _D = 2, 4, 200, 64


def problems() -> Iterator[tuple[str, Problem]]:
    """Named problems: what TensorRT cannot do by itself."""
    rng = np.random.default_rng(0)

    def draw(mask: str, dtype: type = np.float16, **settings: object) -> Problem:
        return random_problem(rng, _B, _H, _S, _D, mask=mask, dtype=dtype, **settings)  # type: ignore[arg-type]

    yield "window", draw("abs(q - k) <= 16")
    yield "causal window, padded", draw("k <= q and q - k <= 40", padded=True)
    yield "grouped heads, global tokens", draw("abs(q - k) <= 8 or k < 4 or q < 4", G=2)
    yield "empty rows, mean", draw("abs(q - k) <= 4", padded=True, empty_rows=EmptyRows.MEAN)
    blocks = rng.random((13, 13)) < 0.3
    yield "single precision", draw("abs(q - k) <= 16", np.float32)
    segments = np.arange(_S)[None] // np.array([[23], [67]])
    ids = {"segment_q": segments, "segment_k": segments}
    yield "documents", replace(draw("segment_q[b, q] == segment_k[b, k]"), operands=ids)
    lengths = {"lengths": np.array([150, 200])}
    yield "lengths, rows beyond them zero", replace(draw("k < lengths[b] and q < lengths[b]"), operands=lengths)
    yield "blocks", replace(draw("table0[q // 16, k // 16]"), operands={"table0": blocks})


def model_of(problem: Problem) -> onnx.ModelProto:
    """A model whose one node is the operator, written as stof-optimize does for target tensorrt."""
    constants = problem.attributes()
    roles = tuple(str(constants["operands"]).split())
    heads = {"num_heads": problem.q.shape[1], "kv_num_heads": problem.k.shape[1]}
    arrays = problem.inputs()
    names = ["query", "key", "value", *roles]
    tables = [n for n in roles if n.startswith("table")]
    expression = MaskExpression.parse(problem.mask, {n: problem.operands[n] for n in tables})
    mask = LiftedMask(
        expression,
        tables=tuple((n, str(a.dtype), a.shape, a.tobytes()) for n in tables for a in [problem.operands[n]]),
    )
    attributes = {
        **constants,
        **heads,
        **constants_attribute(mask, roles),
        "mask_id": 0,
        "scale": float(problem.q.shape[3] ** -0.5) if problem.scale is None else problem.scale,
        "layout": "BHSD",
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
    }
    typed = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in zip(names, arrays, strict=True)}
    inputs = [
        helper.make_tensor_value_info(n, typed[n], a.shape)
        for n, a in zip(names, arrays, strict=True)
        if n not in tables
    ]
    output = helper.make_tensor_value_info("output", typed["query"], problem.shape)
    node = helper.make_node(OP, names, ["output"], "attention", domain=DOMAIN, **attributes)
    grouped = heads["num_heads"] != heads["kv_num_heads"]
    variant = Variant(
        expression,
        (Layout.BHSD,) * 4,
        grouped,
        problem.empty_rows,
        int(problem.query_offset),
        problem.softcap,
        roles,
        typed["query"],
    )
    initializers = [onnx.numpy_helper.from_array(problem.operands[n], n) for n in tables]
    return helper.make_model(
        helper.make_graph([node], "selftest", inputs, [output], initializers),
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[make_attention_function([variant], _OPSET)],
        ir_version=8,
    )


def selftest(module: str | None, capabilities: tuple[int, ...], *, run: bool, verbose: bool = False) -> int:
    """Builds every problem's engine, and runs it where ``run`` is set; prints a line for each. 0: all is well; 2: not.

    Raises:
        TensorrtError: when TensorRT, the plugin library, a CUDA package or a GPU is missing.
    """
    trt = find(module)
    if run:
        open_device().close()  # says what is missing before minutes of building
    say(f"{trt.__name__} {trt.__version__}")
    failed = 0
    with temporary_folder() as folder:
        for name, problem in problems():
            path, plan = folder / "model.onnx", folder / "model.plan"
            onnx.save(model_of(problem), str(path))
            options = BuildOptions(capabilities=capabilities, module=module, verbose=verbose)
            try:
                report = build_engine(path, plan, options)
                words = f"built, {len(report.layers)} plugin layer"
                if run:
                    _check(trt, plan, problem, verbose)
                    words += ", runs, right"
            except (StofError, AssertionError) as error:
                words, failed = f"FAILED: {error}", failed + 1
            say(f"  {name}: {words}")
    say("all is well" if not failed else f"{failed} failed")
    if not run:
        say("nothing was run (--build-only)")
    return 2 if failed else 0


def _check(trt: object, plan: Path, problem: Problem, verbose: bool) -> None:
    names = ["query", "key", "value", *str(problem.attributes()["operands"]).split()]
    with open_device() as device:
        engine = Engine(trt, plan.read_bytes(), plan.name, device, Messages(verbose))
        feeds = {n: a for n, a in zip(names, problem.inputs(), strict=True) if n in engine.inputs}
        engine.set_inputs(feeds)
        wanted = reference(problem)
        for _ in range(2):
            assert_close(engine.run()["output"], wanted)
