# SPDX-License-Identifier: Apache-2.0
"""Optimized models through TensorRT for RTX, without a GPU: parsed and built, with the plugin library and without.

Needs TensorRT for RTX and the plugin library (tools/test_parts/engines.sh). Each build that loads the library is a process of its
own, since what a process loaded it keeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof
from stof.attention.checks.reference import random_problem
from stof.fusion.decide.estimated import LEAST_ESTIMATED
from stof.graph.index import all_nodes
from stof.mask.site import EmptyRows
from stof.options import Options
from stof.tensorrt import BuildOptions, build_engine
from stof.tensorrt.build import stof_nodes
from stof.tensorrt.inspect import read_recorded_layers
from stof.tensorrt.selftest import model_of

CAPABILITIES = (86, 89, 120)
# Sites and distinct masks that target tensorrt replaces; dense and causal ones it leaves.
EXPECTED = {
    "modernbert": (2, 1),
    "mistral": (2, 1),
    "longformer": (2, 1),
    "bigbird": (2, 1),
    "three-masks": (4, 3),
    "mixed": (2, 2),
    "documents": (2, 1),
    "fp32": (2, 1),
}
LEFT = {"modernbert": 2}
# Chains with --chains on, in the files NAME.chains; without it none of these models has one.
CHAINS = {"modernbert": 18, "mistral": 12, "longformer": 7, "bigbird": 7, "three-masks": 18, "fp32": 7}
ALL = [*EXPECTED, *(f"{name}.chains" for name in CHAINS)]
SEGMENTS = {n: np.repeat(np.arange(61)[None] // 9, 2, 0) for n in ("segment_q", "segment_k")}
FIXED = {"bigbird", "mixed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The originals and their optimized forms, written once."""
    found = tmp_path_factory.mktemp("models")
    for name, model in models.models().items():
        path = found / f"{name}.onnx"
        onnx.save(model, str(path))
        options = Options(target="tensorrt", ignore_empty_rows=True, verify_budget=4)
        report = stof.optimize(path, found / f"{name}.stof.onnx", options)
        replaced = [s for s in report.sites if s.replaced]
        assert (len(replaced), len({s.mask for s in replaced})) == EXPECTED[name], report.to_text()
        left = [s for s in report.sites if "TensorRT fuses it" in s.reason]
        assert len(left) == LEFT.get(name, 0) == len(report.sites) - len(replaced), report.to_text()
        assert not any(c.replaced for c in report.chains), report.to_text()
        if name in CHAINS:
            options = replace(options, chains="on")
            report = stof.optimize(path, found / f"{name}.chains.stof.onnx", options)
            assert sum(c.replaced for c in report.chains) == CHAINS[name], report.to_text()
    return found


def original(name: str) -> str:
    """The model that a file is made of."""
    return name.removesuffix(".chains")


def shapes(model: onnx.ModelProto) -> list[str]:
    """The options that give every input sizes 1 x 1 to 2 x 512; none where they are fixed."""
    inputs = [i for i in model.graph.input if not all(d.dim_value for d in i.type.tensor_type.shape.dim)]
    ranges = (("--min", "1x1"), ("--opt", "1x128"), ("--max", "2x512"))
    return [f"{o}={','.join(f'{i.name}:{sizes}' for i in inputs)}" for o, sizes in ranges if inputs]


def command(*arguments: str, plugin: bool = True) -> subprocess.CompletedProcess[str]:
    """``stof-trt`` of this source tree in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    if not plugin:
        environment.pop("STOF_TRT_LIBRARY")
    return subprocess.run(
        [sys.executable, "-m", "stof.tensorrt.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("name", ALL)
def test_builds_with_the_plugin(name: str, folder: Path, tmp_path: Path) -> None:
    path, plan = folder / f"{name}.stof.onnx", tmp_path / "model.plan"
    model = onnx.load(str(path))
    targets = [f"--capability={n}" for n in CAPABILITIES]
    run = command("build", str(path), "-o", str(plan), *shapes(model), *targets)
    assert run.returncode == 0, run.stderr
    sites = EXPECTED[original(name)][0] + (CHAINS[original(name)] if name.endswith(".chains") else 0)
    assert f"{sites} of {sites} stof nodes are plugin layers" in run.stdout
    layers = read_recorded_layers(plan.read_bytes())
    assert {(layer.name, layer.kind, layer.stof) for layer in layers} == {
        (n.name, n.op_type, True) for n in model.graph.node if n.domain == "stof"
    }
    listed = command("inspect", str(plan), "--json")
    assert listed.returncode == 0, listed.stderr
    assert sum(layer["stof"] for layer in json.loads(listed.stdout)["layers"]) == sites


@pytest.mark.parametrize("name", ALL)
def test_builds_without_the_plugin(name: str, folder: Path, tmp_path: Path) -> None:
    path, plan = folder / f"{name}.stof.onnx", tmp_path / "model.plan"
    targets = [f"--capability={n}" for n in CAPABILITIES]
    arguments = ("build", str(path), "-o", str(plan), *shapes(onnx.load(str(path))), *targets)
    run = command(*arguments, plugin=False)
    assert run.returncode == 1
    assert "libstof_trt.so is not installed" in run.stderr
    assert not plan.exists()
    run = command(*arguments, "--no-plugins", plugin=False)
    assert run.returncode == 0, run.stderr
    assert f"{len(stof_nodes(onnx.load(str(path))))} stof nodes are computed by their bodies" in run.stdout
    assert plan.stat().st_size > 100_000
    assert read_recorded_layers(plan.read_bytes()) == ()


def test_three_variants_become_branches(folder: Path) -> None:
    model = onnx.load(str(folder / "three-masks.stof.onnx"))
    (function,) = [f for f in model.functions if f.domain == "stof"]
    assert sum(n.op_type == "If" for n in all_nodes(function.node)) == 2


BODIES: dict[str, dict[str, Any]] = {
    "softcap": {"mask": "k <= q", "softcap": 30.0},
    "cross, last queries": {"mask": "k <= q", "T": 77, "query_offset": True, "padded": True},
    "rows without keys, zero": {"mask": "abs(q - k) <= 2", "padded": True},
    "rows without keys, nan": {"mask": "abs(q - k) <= 2", "padded": True, "empty_rows": EmptyRows.NAN},
    "rows without keys, mean": {"mask": "abs(q - k) <= 2", "padded": True, "empty_rows": EmptyRows.MEAN},
    "rows without keys, all": {"mask": "abs(q - k) <= 2", "padded": True, "empty_rows": EmptyRows.ALL},
    "arithmetic": {"mask": "(q - k) % 3 == 0 and (q // 8 == k // 8 or not k < 4 or min(q, k) != max(h, 2))"},
    "sink": {"mask": "k <= q", "sink": np.linspace(-1, 1, 4, dtype=np.float32)},
    "bias": {"mask": "abs(q - k) <= 9", "bias": np.ones((1, 4, 1, 61), np.float32)},
    "bias by distance": {"relative_bias": np.linspace(-1, 1, 4 * 31, dtype=np.float32).reshape(4, 31)},
    "documents": {"mask": "segment_q[b, q] == segment_k[b, k]", "operands": SEGMENTS},
    "lengths": {"mask": "k < lengths[b]", "operands": {"lengths": np.array([3, 50])}},
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_every_form_build(name: str, tmp_path: Path) -> None:
    """In this process, in which no test may load the library."""
    settings = {"T": 61, "G": 2, **BODIES[name]}
    problem = random_problem(np.random.default_rng(1), 2, 4, 61, 16, dtype=np.float16, **settings)
    onnx.save(model_of(problem), str(tmp_path / "model.onnx"))
    options = BuildOptions(plugins=False, capabilities=(89,))
    report = build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", options)
    assert (report.nodes, report.layers) == (("attention",), ())
    assert report.bytes == (tmp_path / "model.plan").stat().st_size > 1000


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("library", [True, False], ids=["library", "bodies"])
def test_the_same_file_runs_in_onnx_runtime(name: str, library: bool, folder: Path) -> None:
    model = onnx.load(str(folder / f"{original(name)}.onnx"))
    fixed = original(name) in FIXED
    feed = models.feeds(model, 1 if fixed else 2, models.LENGTH if fixed else 77)
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    wanted = ort.InferenceSession(str(folder / f"{original(name)}.onnx")).run(None, feed)
    found = ort.InferenceSession(str(folder / f"{name}.stof.onnx"), options).run(None, feed)
    real = feed["attention_mask"] != 0  # queries that are padding may have no key
    for a, b in zip(wanted, found, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.shape[:2] == real.shape:
            a, b = a[real], b[real]
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.abs(a - b).max() <= 2e-2 * np.abs(a).max()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "bodies"])
def test_what_tensorrt_cuts_beside_attention_becomes_a_chain(groups: int, plugin: bool, tmp_path: Path) -> None:
    """Norms and rotary embeddings of heads of one packed product: four kernels of TensorRT's own.

    Where queries and keys are not alike each has a chain of its own, for which TensorRT would cut the product: they stay.
    """
    path, written, plan = tmp_path / "model.onnx", tmp_path / "out.onnx", tmp_path / "out.plan"
    onnx.save(models.head_norms(groups=groups), str(path))
    report = stof.optimize(path, written, Options(target="tensorrt", verify_budget=2))
    assert sum(s.replaced for s in report.sites) == 1, report.to_text()
    taken = [c for c in report.chains if c.replaced]
    assert len(taken) == (groups == 4), report.to_text()
    assert all((c.gain or 0) >= LEAST_ESTIMATED for c in taken)
    assert taken or all("of TensorRT's own kernels' speed" in c.reason for c in report.chains)
    ranges = (("--min", "1x1"), ("--opt", "1x128"), ("--max", "2x512"))
    lengths = [sizes.split("x")[1] for _, sizes in ranges]
    rows = [f"{o}=input_ids:{s}x64,cos:{n}x16,sin:{n}x16" for (o, s), n in zip(ranges, lengths, strict=True)]
    targets = [f"--capability={n}" for n in CAPABILITIES]
    bodies = [] if plugin else ["--no-plugins"]
    run = command("build", str(written), "-o", str(plan), *rows, *targets, *bodies, plugin=plugin)
    assert run.returncode == 0, run.stderr
    kinds = sorted(layer.kind for layer in read_recorded_layers(plan.read_bytes()))
    assert kinds == (["StofAttention", *["StofChain"] * len(taken)] if plugin else [])


def test_timing_cache_embedding_and_hardware(folder: Path, tmp_path: Path) -> None:
    path, plan, cache = folder / "modernbert.stof.onnx", tmp_path / "model.plan", tmp_path / "cache"
    base = ["build", str(path), *shapes(onnx.load(str(path))), "--capability=89"]
    run = command(*base, "-o", str(plan), "--timing-cache", str(cache), "--hardware-compatible", "same")
    assert run.returncode == 0, run.stderr
    assert cache.stat().st_size > 0
    run = command(*base, "-o", str(tmp_path / "embedded.plan"), "--timing-cache", str(cache), "--embed-plugins")
    assert run.returncode == 0, run.stderr
    library = Path(os.environ["STOF_TRT_LIBRARY"]).read_bytes()
    assert library in (tmp_path / "embedded.plan").read_bytes()
    assert library not in plan.read_bytes()


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--capability=90"], 1, "--capability 90: tensorrt_rtx_bindings 1.7.1.116 does not build for it"),
        (["--opt=ids:1x8"], 1, "--opt names 'ids', which is no input of the model; these are: input_ids"),
        (["--opt=input_ids:1x8x8"], 1, "--opt gives input 'input_ids' the shape 1x8x8; the model has -1x-1"),
        ([], 1, "input 'input_ids' has shape -1x-1, and no option says how large it gets"),
        (["--tensorrt=tensorrt"], 1, "tensorrt is not installed"),
    ],
)
def test_errors_say_what_to_do(options: list[str], status: int, words: str, folder: Path, tmp_path: Path) -> None:
    run = command("build", str(folder / "modernbert.stof.onnx"), "-o", str(tmp_path / "x.plan"), *options)
    assert (run.returncode, words in run.stderr) == (status, True), run.stderr
    assert not (tmp_path / "x.plan").exists()


def test_a_model_that_does_not_parse_names_the_node(tmp_path: Path) -> None:
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"], "the culprit", domain="elsewhere")
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xy")
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("elsewhere", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=8)
    onnx.save(model, str(tmp_path / "bad.onnx"))
    run = command("build", str(tmp_path / "bad.onnx"), "-o", str(tmp_path / "bad.plan"))
    assert run.returncode == 3
    assert "cannot parse" in run.stderr
    assert "the culprit" in run.stderr


def test_a_changed_namespace_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A call that silently became its body would cost the user all of the speed."""
    model = onnx.load(str(folder / "modernbert.stof.onnx"))
    call = next(n for n in model.graph.node if n.op_type == "StofAttention")
    call.attribute.remove(next(a for a in call.attribute if a.name == "plugin_namespace"))
    onnx.save(model, str(tmp_path / "model.onnx"))
    run = command("build", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "model.plan"), *shapes(model))
    assert run.returncode == 3
    assert f"1 of 2 stof nodes did not become plugin layers, first {call.name!r}" in run.stderr


def test_python_builds_too(folder: Path, tmp_path: Path) -> None:
    """In this process, without the library, which other tests of it must not find."""
    sizes = dict.fromkeys(("input_ids", "attention_mask"), (1, 64))
    options = BuildOptions(usual=sizes, plugins=False, capabilities=(89,))
    report = build_engine(folder / "mistral.stof.onnx", tmp_path / "model.plan", options)
    assert report.bytes == (tmp_path / "model.plan").stat().st_size
    assert (len(report.nodes), report.layers) == (2, ())
    assert dict(report.inputs)["input_ids"] == ((1, 64),) * 3
