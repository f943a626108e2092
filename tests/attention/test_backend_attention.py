# SPDX-License-Identifier: Apache-2.0
"""ONNX backend tests of ``Attention``, as fused nodes and as function bodies: optimized, run, compared with their data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

import stof
from stof.attention.plan_entry import SitePlan
from stof.attention.report import Step
from stof.options import Options
from stof.plan import Plan
from stof.report import Report

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other operators' tests, which are made with these
    CASES = {c.name: c for c in collect_testcases(None) if c.name.startswith("test_attention")}

COUNTS: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Prints what became of the tests."""
    yield
    print("\nAttention node tests of onnx", onnx.__version__)
    for words, count in sorted(COUNTS.items()):
        print(f"{count:5d}  {words}")


def test_all_are_there() -> None:
    """The package ships every opset's tests, each with its function body."""
    assert len(CASES) >= 186
    fused = {n for n in CASES if "_expanded" not in n}
    assert {f"{n}_expanded" for n in fused} == set(CASES) - fused
    assert {c.model.opset_import[0].version for c in CASES.values()} >= {23, 24, 25}


def why_kept(name: str) -> str:
    """What keeps a test's site as it is, by the meaning of its node; empty when it must be replaced."""
    fused = CASES[name.removesuffix("_expanded")].model.graph
    node = fused.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if len(node.output) > 3 and node.output[3]:
        if not name.endswith("_expanded"):
            return "its output qk_matmul_output"
        if attributes.get("softmax_precision") == TensorProto.DOUBLE:
            return "no MatMul of a query and a key was found"
        if attributes.get("qk_matmul_output_mode", 0) == 3:
            return (
                "the attention weights"  # other modes' outputs are scores, which a MatMul beside the site still gives
            )
    return ""


def forced(path: Path, target: Path) -> Report:
    """Optimizes a model as far as it can be: its few positions are too short for any gain."""
    found = stof.optimize(path, options=Options(dry_run=True))
    entries = [
        SitePlan(s.site, s.step in (Step.COST, Step.DONE), s.mask, reason=s.reason)
        for s in found.sites
        if s.index is not None
    ]
    plan = target.with_suffix(".json")
    Plan({"sites": tuple(entries)}).save(plan)
    return stof.optimize(path, target, Options(plan=plan))


def run(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in ONNX Runtime, bf16 ones too, which NumPy's arrays cannot carry into it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    if all(a.dtype.name != "bfloat16" for a in feeds.values()):
        return list(session.run(None, feeds))
    given = {
        n: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(a.view(np.uint16), TensorProto.BFLOAT16)
        if a.dtype.name == "bfloat16"
        else ort.OrtValue.ortvalue_from_numpy(a)
        for n, a in feeds.items()
    }
    found = session.run_with_ort_values([o.name for o in session.get_outputs()], given)
    widen = helper.make_model(
        helper.make_graph(
            [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
            "widen",
            [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, None)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    cast = ort.InferenceSession(widen.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [cast.run_with_ort_values(["y"], {"x": v})[0].numpy() for v in found]


def close(found: list[Any], wanted: list[Any], rtol: float, atol: float) -> bool:
    """Whether outputs are equal within the test's tolerance, half ones within two units in the last place."""
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            return False
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(b.dtype.name, 0.0)
        x, y = a.astype(np.float64), b.astype(np.float64)
        if not np.allclose(x, y, rtol=max(rtol, 2 * unit), atol=max(atol, unit * 2.0**-4)):
            return False
    return True


@pytest.mark.parametrize("name", sorted(CASES))
def test_stored_outputs(name: str, tmp_path: Path) -> None:
    """The optimized model gives the stored outputs; a site that stays has its reason, and its model is not written."""
    case = CASES[name]
    source, target = tmp_path / "model.onnx", tmp_path / "optimized.onnx"
    onnx.save(case.model, source)
    report = forced(source, target)
    reason = why_kept(name)
    assert len(report.sites) == 1
    site = report.sites[0]
    assert site.replaced == (not reason), site.reason
    assert reason in site.reason
    assert report.copied != site.replaced
    optimized = target if site.replaced else source
    how = "ONNX Runtime"
    for inputs, outputs in case.data_sets:
        feeds = {i.name: np.asarray(a) for i, a in zip(case.model.graph.input, inputs, strict=True)}
        wanted = [np.asarray(a) for a in outputs]
        try:
            good = close(run(optimized, feeds), wanted, case.rtol, case.atol)
        except Exception:  # the runtime lacks a kernel of another node, or of the untouched original
            good = False
        if not good and not (site.replaced and "bf16" not in name):
            # A model that stays as it was may also differ from the data by the runtime's own doing.
            how = "the onnx package's evaluator"
            with np.errstate(all="ignore"):
                found: list[Any] = ReferenceEvaluator(str(optimized)).run(None, feeds)  # type: ignore[assignment]
            good = close(found, wanted, case.rtol, case.atol)
        assert good
    COUNTS[f"replaced, run by {how}" if site.replaced else f"kept ({reason}), run by {how}"] += 1
