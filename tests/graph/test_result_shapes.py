# SPDX-License-Identifier: Apache-2.0
"""Results of stof's operators have types and shapes for tools that know only standard operators (quantization, for one).

``quant_pre_process`` of ONNX Runtime ended with "Incomplete symbolic shape inference" on files that stof wrote: its symbolic
inference drops ``value_info``, and sees only what the nodes of a local function say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_forms import model as graph_of
from mlp_models import MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
from tests.cached_attention import gqa_models
from tests.paged_attention import paged_models

import stof
from stof.graph.index import DOMAIN, all_nodes
from stof.options import Options
from stof.result_shapes import AxesOfInput, ResultRules, declare_results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models"))
import build  # noqa: E402  (a script of the repository, not of a package)

HEADS = "%heads\n%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\n"
PACKED = "float[B,S,32] x, float[B,S,32] y, float[B,S,32] z"
OUT = "float[B,S,32] out"


@pytest.fixture(autouse=True)
def _no_files_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's tools leave files in the working directory."""
    monkeypatch.chdir(tmp_path)


def transformer(*, layers: int = 2, size: int = 64, heads: int = 4, seed: int = 0) -> onnx.ModelProto:
    """[B, S, size] to [B, S, size]: attention, residuals and norms, an MLP."""
    rng = np.random.default_rng(seed)
    text: list[str] = []
    stored: dict[str, np.ndarray] = {"one": np.ones(size), "zero": np.zeros(size), "scale": np.array(0.25)}
    shapes = {"split": np.array([0, 0, heads, size // heads]), "merge": np.array([0, 0, size])}
    x = "x"
    for i in range(layers):
        for name in "qkv":
            stored[f"w{name}{i}"] = rng.standard_normal((size, size)) / np.sqrt(size)
            perm = "0, 2, 3, 1" if name == "k" else "0, 2, 1, 3"
            text += [f"{name}m{i} = MatMul ({x}, w{name}{i})", f"{name}r{i} = Reshape ({name}m{i}, split)"]
            text += [f"{name}{i} = Transpose <perm = [{perm}]> ({name}r{i})"]
        stored[f"wo{i}"] = rng.standard_normal((size, size)) / np.sqrt(size)
        text += [f"s{i} = MatMul (q{i}, k{i})", f"t{i} = Mul (s{i}, scale)", f"p{i} = Softmax <axis = -1> (t{i})"]
        text += [f"c{i} = MatMul (p{i}, v{i})", f"d{i} = Transpose <perm = [0, 2, 1, 3]> (c{i})"]
        text += [f"e{i} = Reshape (d{i}, merge)", f"o{i} = MatMul (e{i}, wo{i})", f"r{i} = Add (o{i}, {x})"]
        x = "y" if i + 1 == layers else f"h{i}"
        text += [f"{x} = LayerNormalization (r{i}, one, zero)"]
    found = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g (float[B,S,{size}] x) => (float[B,S,{size}] y) {{\n'
        + "\n".join(text)
        + "\n}"
    )
    found.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in stored.items())
    found.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in shapes.items())
    return found


def optimized(model: onnx.ModelProto, folder: Path, **options: object) -> onnx.ModelProto:
    onnx.save(model, str(folder / "model.onnx"))
    settings = Options(verify=False, **options)  # type: ignore[arg-type]
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", settings)
    assert report.replaced, report.to_text()
    return onnx.load(str(folder / "out.onnx"))


def session(model: onnx.ModelProto | Path, *, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def dims(info: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in info.type.tensor_type.shape.dim]


def results(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """What is declared of the results of stof's nodes in the main graph; each of them is."""
    known = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names = [o for n in model.graph.node if n.domain == DOMAIN for o in n.output if o]
    assert names
    for name in names:
        assert known[name].type.tensor_type.elem_type, name
        assert known[name].type.tensor_type.HasField("shape"), name
    return {name: known[name] for name in names}


def check_declared(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> None:
    """Each declared size of a result is that of a run: numbers, and names as the inputs have them."""
    shown = onnx.ModelProto.FromString(model.SerializeToString())
    declared = results(model)
    outputs = {o.name for o in model.graph.output}
    for name, info in declared.items():
        if name not in outputs:
            shown.graph.output.append(helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, None))
    made = session(shown, library=True)
    for feed in feeds:
        sizes = {
            d: n
            for v in model.graph.input
            for d, n in zip(dims(v), feed[v.name].shape, strict=True)
            if isinstance(d, str)
        }
        for name, array in zip(declared, made.run(list(declared), feed), strict=True):
            wanted = dims(declared[name])
            assert len(wanted) == array.ndim, name
            for size, actual in zip(wanted, array.shape, strict=True):
                assert size == "" or sizes.get(str(size), size) == actual, (name, wanted, array.shape)
            assert helper.np_dtype_to_tensor_dtype(array.dtype) == declared[name].type.tensor_type.elem_type


def infer_symbolically(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    found = SymbolicShapeInference.infer_shapes(model)
    return {v.name: dims(v) for v in (*found.graph.value_info, *found.graph.output)}


def check_inferred(model: onnx.ModelProto) -> None:
    """ONNX Runtime's inference gives the results the shapes that are declared, onnx's strict one refuses nothing."""
    found = infer_symbolically(model)
    inputs = {d for v in model.graph.input for d in dims(v)}
    for name, info in results(model).items():
        assert len(found[name]) == len(dims(info))
        if inputs.issuperset(d for d in dims(info) if isinstance(d, str)):
            assert found[name] == dims(info), name
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def draw(model: onnx.ModelProto, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d if isinstance(d, int) else sizes[d] for d in dims(value)]
        feed[value.name] = rng.integers(0, 40, shape) if dtype.kind == "i" else rng.standard_normal(shape).astype(dtype)
    return feed


def check_same(
    original: onnx.ModelProto, model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], atol: float
) -> None:
    """The library and the function bodies compute what the original does."""
    made = [session(original, library=False), session(model, library=False), session(model, library=True)]
    for feed in feeds:
        wanted, *others = (s.run(None, feed) for s in made)
        for found in others:
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b, atol=atol)


# ---- the tools ----
class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Two batches of inputs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.feeds = iter([draw(model, seed, B=2, S=9) for seed in range(2)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


@pytest.mark.parametrize("chains", ["off", "on"])
def test_quantization_pre_processing_with_defaults(
    chains: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file passes, and so do the tools behind it: the quantized models run with and without the library."""
    original = transformer()
    optimized(original, tmp_path, chains=chains)
    quant_pre_process(str(tmp_path / "out.onnx"), str(tmp_path / "pre.onnx"))
    quant_pre_process(str(tmp_path / "out.onnx"), str(tmp_path / "kept.onnx"), skip_optimization=True)
    quantize_dynamic(str(tmp_path / "kept.onnx"), str(tmp_path / "dynamic.onnx"))
    options = {"quant_format": QuantFormat.QDQ, "op_types_to_quantize": ["MatMul"]}
    quantize_static(str(tmp_path / "kept.onnx"), str(tmp_path / "static.onnx"), Reader(original), **options)
    feed = draw(original, B=2, S=13)
    (wanted,) = session(original, library=False).run(None, feed)
    for name, limit in (("pre", 1e-5), ("kept", 1e-5), ("dynamic", 0.3), ("static", 0.3)):
        model = onnx.load(str(tmp_path / f"{name}.onnx"))
        assert any(n.domain == DOMAIN for n in model.graph.node) == (name != "pre")
        for library in (False, True):
            (found,) = session(model, library=library).run(None, feed)
            assert np.abs(found - wanted).max() < limit, name


def test_large_models_pass_with_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(
        transformer(), str(tmp_path / "model.onnx"), save_as_external_data=True, location="w.bin", size_threshold=1024
    )
    stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(verify=False))
    quant_pre_process(
        str(tmp_path / "out.onnx"), str(tmp_path / "pre.onnx"), save_as_external_data=True, all_tensors_to_one_file=True
    )
    feed = draw(onnx.load(str(tmp_path / "model.onnx"), load_external_data=False), B=1, S=7)
    wanted, found = (
        session(tmp_path / f"{n}.onnx", library=library).run(None, feed)[0]
        for n, library in (("model", False), ("pre", True))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


# ---- every operator ----
ATTENTION = {
    "flat": (PACKED, OUT, HEADS + "p = Softmax (s2)\no = MatMul (p, v)\n%merge\n"),
    "a window": (PACKED, OUT, HEADS + "%window\n%added\ns3 = Add (s2, added)\np = Softmax (s3)\no = MatMul (p, v)\n%merge\n"),
    "heads": (
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v", "float[B,4,S,8] out",
        "%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\np = Softmax (s2)\nout = MatMul (p, v)",
    ),
    "heads to flat": (
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v", OUT,
        "%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\np = Softmax (s2)\no = MatMul (p, v)\n%merge\n",
    ),
    "another size of values": (
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,5] v", "float[B,4,S,5] out",
        "%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\np = Softmax (s2)\nout = MatMul (p, v)",
    ),
}  # fmt: skip
SIZES = ({"B": 2, "S": 7, "T": 9}, {"B": 1, "S": 1, "T": 5}, {"B": 3, "S": 12, "T": 12})


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, opset: int, tmp_path: Path) -> None:
    original = graph_of(*ATTENTION[name], opset=opset)
    model = optimized(original, tmp_path)
    (shape,) = map(dims, results(model).values())
    assert "B" in shape
    assert "S" in shape
    feeds = [draw(original, **sizes) for sizes in SIZES]
    check_declared(model, feeds)
    check_inferred(model)
    check_same(original, model, feeds, 1e-5)


@pytest.mark.parametrize("chains", ["off", "on"])
def test_calls_with_other_names_and_sizes_share_a_function(chains: str, tmp_path: Path) -> None:
    """Each call has the names of its own dimensions, as an encoder and a decoder have them."""
    one, other = transformer(layers=1), transformer(layers=1, size=32, heads=2, seed=1)
    for value in (*other.graph.input, *other.graph.output):
        for d, name in zip(value.type.tensor_type.shape.dim, ("rows", "length"), strict=False):
            d.dim_param = name
    original = onnx.compose.merge_models(one, onnx.compose.add_prefix(other, "other/"), io_map=[])
    model = optimized(original, tmp_path, chains=chains)
    shapes = list(map(dims, results(model).values()))
    names = {str(d).rpartition("/")[2] for shape in shapes for d in shape if isinstance(d, str)}
    assert names == {"B", "S", "rows", "length"}
    inputs = [dims(v) for v in original.graph.input]
    feeds = [
        draw(original, **{str(inputs[0][0]): 2, str(inputs[0][1]): 5, str(inputs[1][0]): 3, str(inputs[1][1]): n})
        for n in (4, 9)
    ]
    check_declared(model, feeds)
    check_inferred(model)
    check_same(original, model, feeds, 1e-5)


def test_chains_with_fewer_results_than_others(tmp_path: Path) -> None:
    """Results that a call does not have are vectors of one element in the function; each call has another source of axes."""
    original = build.fill(build.load_graph("narrow/mistral.torchscript.eager"))
    model = optimized(original, tmp_path, chains="on")
    (function,) = (f for f in model.functions if f.name == "StofChain")
    counts = {sum(map(bool, n.output)) for n in model.graph.node if n.op_type == "StofChain"}
    assert len(counts) > 1
    assert {f"output{i}_axes" for i in range(max(counts))} <= set(function.attribute)
    check_inferred(model)


@pytest.mark.usefixtures("small_mlps_gain")
@pytest.mark.parametrize(
    "form", [MlpForm(), MlpForm(gated=True), MlpForm(gemm=True), MlpForm(dtype=TensorProto.FLOAT16)], ids=str
)
def test_mlps(form: MlpForm, tmp_path: Path) -> None:
    original = make_mlp_model(form, layers=2)
    model = optimized(original, tmp_path)
    feeds = [draw(original, B=2, S=n, P=3) for n in (1, 6)]
    check_declared(model, feeds)
    assert [n.op_type for n in model.graph.node].count("StofSparseMLP") == 2
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    check_same(original, model, feeds, 5e-2 if form.dtype == TensorProto.FLOAT16 else 1e-3)


@pytest.mark.usefixtures("small_mlps_gain", "dequantized_mlps_gain")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_mlps(bits: int, tmp_path: Path) -> None:
    """Rows of quantized weights hold bytes: the size of a result is that of the scales."""
    original = make_mlp_model(MlpForm(bits=bits, size=64, neurons=160))
    model = optimized(original, tmp_path)
    (shape,) = [dims(v) for n, v in results(model).items()]
    assert shape == ["B", "S", 64]


def test_caches(tmp_path: Path) -> None:
    """Attention over a cache has value_info. Its function stays the node itself, so that the cache is one buffer."""
    shapes = (gqa_models.Shape(), gqa_models.Shape(packed=True), gqa_models.Shape(cache="int8"))
    for i, shape in enumerate(shapes):
        original = gqa_models.model_of(shape)
        original.graph.node.append(helper.make_node("Relu", ["output"], ["positive"]))
        original.graph.output[0].name = "positive"
        folder = tmp_path / str(i)
        folder.mkdir()
        model = optimized(original, folder)
        assert dims(results(model)["output"]) == ["B", "S", 64]
        (function,) = model.functions
        assert [n.op_type for n in function.node] == ["GroupQueryAttention"]
        onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def test_paged_caches(tmp_path: Path) -> None:
    original = paged_models.model_of(paged_models.Shape())
    original.graph.node.append(helper.make_node("Relu", ["output"], ["positive"]))
    original.graph.output[0].name = "positive"
    model = optimized(original, tmp_path)
    assert dims(results(model)["output"]) == ["N", 64]


BRANCHES = """<ir_version: 9, opset_import: ["": 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v, bool[1] go) => (float[B,4,S,8] out) {
    out = If (go) <
        then_branch = a () => (float[w,x,y,z] then_out) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            s = MatMul (q, kt)
            p = Softmax <axis = -1> (s)
            o = MatMul (p, v)
            then_out = Relu (o)
        },
        else_branch = b () => (float[w,x,y,z] else_out) { else_out = Identity (q) }
    >
}"""
LOOP = """<ir_version: 9, opset_import: ["": 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v, int64 n) => (float[B,4,S,8] out) {
    go = Constant <value = bool {1}> ()
    out = Loop (n, go, q) <
        body = a (int64 i, bool c, float[B,4,S,8] state) => (bool d, float[B,4,S,8] next) {
            d = Identity (c)
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            s = MatMul (state, kt)
            p = Softmax <axis = -1> (s)
            o = MatMul (p, v)
            next = Relu (o)
        }
    >
}"""


@pytest.mark.parametrize(("text", "rows"), [(BRANCHES, "S"), (LOOP, "")], ids=["If", "Loop"])
def test_subgraphs(text: str, rows: str, tmp_path: Path) -> None:
    """A loop's states may have another size in each round: their names do not count."""
    original = onnx.parser.parse_model(text)
    model = optimized(original, tmp_path)
    graphs = [a.g for n in model.graph.node for a in n.attribute if a.HasField("g")]
    (graph,) = (g for g in graphs if any(n.domain == DOMAIN for n in g.node))
    (node,) = (n for n in graph.node if n.domain == DOMAIN)
    (info,) = (v for v in graph.value_info if v.name == node.output[0])
    assert info.type.tensor_type.elem_type == TensorProto.FLOAT
    assert dims(info) == ["B" if rows else "", 4, rows, 8]
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    rng = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {n: rng.standard_normal((2, 4, 5, 8)).astype(np.float32) for n in "qkv"}
    feed |= {"go": np.array([True])} if "go" in {i.name for i in original.graph.input} else {"n": np.array(2)}
    check_same(original, model, [feed], 1e-5)


# ---- sizes ----
def test_computed_sizes_have_no_name(tmp_path: Path) -> None:
    """Rows of every second query: their number is no dimension of the model's."""
    body = "start = Constant <value = int64[1] {0}> ()\nend = Constant <value = int64[1] {1000}> ()\n"
    body += "axis = Constant <value = int64[1] {2}> ()\nstep = Constant <value = int64[1] {2}> ()\n"
    body += "half = Slice (q, start, end, axis, step)\n%kt\n%scale\n"
    body += "s1 = MatMul (half, kt)\ns2 = Mul (s1, scale)\np = Softmax (s2)\n"
    original = graph_of(
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
        "float[a,b,c,d] out",
        body + "o = MatMul (p, v)\nout = Relu (o)",
    )
    model = optimized(original, tmp_path)
    (shape,) = map(dims, results(model).values())
    assert shape == ["B", 4, "", 8]
    feeds = [draw(original, B=2, S=n, T=9) for n in (3, 8)]
    check_declared(model, feeds)
    infer_symbolically(model)
    check_same(original, model, feeds, 1e-5)


def test_names_that_broadcasting_made_equal_are_left_open(tmp_path: Path) -> None:
    """A size of ``B`` or ``C`` may be 1 where the other one is not: neither name is the result's for sure."""
    inputs = "float[B,4,S,8] a, float[C,4,S,8] b, float[B,4,S,8] k, float[B,4,S,8] v"
    body = "q = Add (a, b)\n%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\np = Softmax (s2)\n"
    body += "o = MatMul (p, v)\nout = Relu (o)"
    model = optimized(graph_of(inputs, "float[w,x,y,z] out", body), tmp_path)
    (shape,) = map(dims, results(model).values())
    assert shape == ["", 4, "S", 8]


def test_the_interface_and_what_is_declared_stay(tmp_path: Path) -> None:
    original = graph_of(*ATTENTION["heads"])
    for name, d in zip(("p", "q", "r", "s"), original.graph.output[0].type.tensor_type.shape.dim, strict=True):
        d.Clear()
        d.dim_param = name
    model = optimized(original, tmp_path)
    assert dims(model.graph.output[0]) == ["p", "q", "r", "s"]
    again = onnx.ModelProto.FromString(model.SerializeToString())
    declare_results(again, ResultRules(), in_functions=True)
    assert again == model


def test_no_size_is_that_of_an_input() -> None:
    """The axes of a result that are computed are read off the result itself."""
    axes = AxesOfInput("ab,c,de->dce", (5,), (0, 2), 0)
    assert axes.attributes(1) == {"output1_axes": "ab,c,de->dce", "output1_sizes": [5], "output1_computed": [0, 2]}


def test_tensorrt_reads_functions_without_these_nodes(tmp_path: Path) -> None:
    model = optimized(graph_of(*ATTENTION["flat"]), tmp_path, target="tensorrt")
    assert all("output0_axes" not in f.attribute for f in model.functions)
    results(model)


# ---- loading ----
WARNING = re.compile(r"\[[WE]:")
SOME = (
    "narrow/bert.dynamo.sdpa", "narrow/bert.torchscript.eager", "narrow/gemma3.dynamo.eager",
    "narrow/mistral.dynamo.sdpa", "narrow/modernbert.torchscript.sdpa", "narrow/modernbert.dynamo.eager",
    "zoo/t5gemma.dynamo.eager", "zoo/clip.torchscript.sdpa", "zoo/deberta.torchscript.eager",
    "zoo/gpt2.torchscript.eager", "zoo/segformer.torchscript.eager", "zoo/bloom.torchscript.eager",
)  # fmt: skip


@pytest.fixture
def load(capfd: pytest.CaptureFixture[str]) -> Callable[[Path, bool], list[str]]:
    """Loads a file, and gives the warnings of ONNX Runtime without their times."""

    def warnings(path: Path, library: bool) -> list[str]:
        capfd.readouterr()
        session(path, library=library)
        lines = re.sub(r"\x1b\[[\d;]*m", "", capfd.readouterr().err).splitlines()
        return [line.partition("]")[2] for line in lines if WARNING.search(line)]

    return warnings


@pytest.mark.parametrize(("name", "chains"), [*((n, "off") for n in SOME), *((n, "on") for n in SOME[::3])])
def test_loading_warns_of_nothing_new(
    name: str, chains: str, load: Callable[[Path, bool], list[str]], tmp_path: Path
) -> None:
    """Four warnings of unused constants came where the library is missing; a wrong shape would give others."""
    original = build.fill(build.load_graph(name))
    model = optimized(original, tmp_path, chains=chains)
    known = set(load(tmp_path / "model.onnx", False))
    for library in (False, True):
        assert set(load(tmp_path / "out.onnx", library)) <= known
    results(model)
    assert all(n.domain != DOMAIN or n.op_type.startswith("Stof") for n in all_nodes(model.graph.node))
    try:
        infer_symbolically(original)
    except Exception:  # the tool refuses the original as well
        return
    check_inferred(model)
