# SPDX-License-Identifier: Apache-2.0
"""What is written for rows without a key where none can be: biases and masks that are proven, and each reason against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from attention_forms import model
from onnx import TensorProto, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import stof
from stof.attention.find import find_sites
from stof.attention.report import SiteReport
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.row_prover import RowProver
from stof.mask.lift import MAY_FORBID, lift
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask, MaskTerm, TermKind
from stof.options import Options
from stof.symbolic import Symbolic

LOWEST = float(np.finfo(np.float32).min)
QKV = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"
CROSS = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"

# A bias gathered by the place of query and key, as T5's is by buckets; not by their distance, which becomes a table.
BIAS = """
      s1 = MatMul (q, kt)
      r8 = Mod (rows, eight)
      c8 = Mod (columns, eight)
      eights = Mul (r8, eight)
      entry = Add (eights, c8)
      by_pair = Gather (table, entry)
      by_head = Transpose <perm = [2, 0, 1]> (by_pair)
      bias = Unsqueeze (by_head, front)"""
CHOSEN = """
      added = Where (w, bias, low)
      s2 = Add (s1, added)
      p = Softmax <axis = -1> (s2)"""
TABLE = (np.random.default_rng(2).standard_normal((64, 4)) * 2).astype(np.float32)


def biased(
    nodes: str = CHOSEN, inputs: str = QKV, *, mask: str = "near", width: int = 5, **constants: np.ndarray
) -> onnx.ModelProto:
    """Attention under a window, whose bias comes of a table; ``mask``: of ``near``, ``causal`` and both, ``window``."""
    body = f"""%kt
      shape_q = Shape (q)
      shape_k = Shape (k)
      two = Constant <value = int64 {{2}}> ()
      zero = Constant <value = int64 {{0}}> ()
      one = Constant <value = int64 {{1}}> ()
      s = Gather (shape_q, two)
      t = Gather (shape_k, two)
      rows0 = Range (zero, s, one)
      columns = Range (zero, t, one)
      last = Constant <value = int64[1] {{1}}> ()
      rows = Unsqueeze (rows0, last)
      distance = Sub (rows, columns)
      far = Abs (distance)
      near = Less (far, width)
      causal = LessOrEqual (columns, rows)
      before = Less (columns, rows)
      window = And (near, causal)
      w = Identity ({mask})
      {BIAS}
      {nodes}
      out = MatMul (p, v)"""
    made = model(inputs, "float[B,4,S,8] out", body)
    given = {
        "table": TABLE,
        "eight": np.array(8),
        "front": np.array([0]),
        "width": np.array(width),
        "low": np.float32(LOWEST),
        "minus": np.float32(-np.inf),
        "ten": np.float32(10),
        **constants,
    }
    read = {i for n in made.graph.node for i in n.input}
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in given.items() if n in read)
    return made


def optimized(graph: onnx.ModelProto, folder: Path, options: Options | None = None) -> SiteReport:
    """The one site in the report of a run that was verified, against fp64 among others."""
    onnx.save(graph, str(folder / "m.onnx"))
    report = stof.optimize(folder / "m.onnx", folder / "o.onnx", options or Options(verify_budget=5))
    (site,) = report.sites
    assert site.replaced, site.reason
    made = onnx.load(str(folder / "o.onnx"))
    written = [a.s.decode() for n in made.graph.node for a in n.attribute if a.name == "empty_rows"]
    assert written == [site.empty_rows]
    return site


WHERE = """
      s2 = Add (s1, bias)
      s3 = Where (w, s2, soft)
      p = Softmax <axis = -1> (s3)"""
GUARDED = """
      added = Where (w, bias, low)
      s2 = Add (s1, added)
      p0 = Softmax <axis = -1> (s2)
      none = IsNaN (p0)
      null = Constant <value = float {0}> ()
      p = Where (none, null, p0)"""
SCALED = """
      b2 = Mul (bias, ten)
      added = Where (w, b2, low)
      s2 = Add (s1, added)
      p = Softmax <axis = -1> (s2)"""
PROVEN = {
    "a window": (biased(), "nan"),
    "a causal mask": (biased(mask="causal"), "nan"),
    "a causal mask over other keys": (biased(mask="causal", inputs=CROSS), "nan"),
    "a bias before the mask that replaces scores": (biased(WHERE, soft=np.float32(-1e9)), "nan"),
    "a guard": (biased(GUARDED), "zero"),
    "a bias that is scaled": (biased(SCALED), "nan"),
}
INFINITE = np.where(TABLE > 3, -np.inf, TABLE).astype(np.float32)
UNPROVEN = {
    "-inf in the table": biased(table=INFINITE),
    "NaN in the table": biased(table=np.where(TABLE > 3, np.nan, TABLE).astype(np.float32)),
    "a table that a caller may replace": biased(inputs=f"{QKV}, float[64,4] table"),
    "a bias of the run": biased(CHOSEN.replace("bias", "given"), f"{QKV}, float[1,4,S,S] given"),
    "a product that may overflow": biased(SCALED, ten=np.float32(3e38)),
    "a window over fewer keys": biased(inputs=CROSS),
    "a causal window over fewer keys": biased(mask="window", inputs=CROSS),
    "a first query without a key": biased(mask="before"),
}


@pytest.mark.parametrize("name", PROVEN)
def test_rows_that_have_a_key(name: str, tmp_path: Path) -> None:
    graph, wanted = PROVEN[name]
    site = optimized(graph, tmp_path)
    assert site.empty_rows == wanted
    assert str(MAY_FORBID) not in site.notes


@pytest.mark.parametrize("name", UNPROVEN)
def test_rows_that_may_have_none(name: str) -> None:
    mask = settled(UNPROVEN[name])
    assert mask.empty_rows is EmptyRows.MEAN
    assert MAY_FORBID in mask.notes


def settled(graph: onnx.ModelProto) -> LiftedMask:
    """The mask of the one site of a graph, with what is proven of it."""
    symbolic = Symbolic(graph)
    (site,), _ = find_sites(graph, symbolic)
    return RowProver(MaskChecker(graph, symbolic)).simplify_empty_rows(site, lift(symbolic, site))


PADDING = """
      f = Cast <to = 9> (mask)
      f4 = Unsqueeze (f, middle)
      ww = {join} (w, f4)
      added = Where (ww, bias, low)
      s2 = Add (s1, added)
      p = Softmax <axis = -1> (s2)"""


@pytest.mark.parametrize(
    ("join", "mask", "wanted"), [("And", "near", "mean"), ("Or", "near", "nan"), ("Or", "before", "mean")]
)
def test_padding_leaves_a_key_where_something_else_does(join: str, mask: str, wanted: str, tmp_path: Path) -> None:
    graph = biased(PADDING.format(join=join), f"{QKV}, int64[B,S] mask", mask=mask, middle=np.array([1, 2]))
    assert optimized(graph, tmp_path).empty_rows == wanted


def test_documents_of_their_own_leave_a_key_without_a_bias(tmp_path: Path) -> None:
    """Kernels cannot know before a run that a query is of its own document."""
    nodes = """%kt
      s1 = MatMul (q, kt)
      i0 = Unsqueeze (ids, row)
      i1 = Unsqueeze (ids, column)
      w = Equal (i0, i1)
      s2 = Where (w, s1, low)
      p = Softmax <axis = -1> (s2)
      out = MatMul (p, v)"""
    graph = model(f"{QKV}, int64[B,S] ids", "float[B,4,S,8] out", nodes)
    constants = {"row": np.array([1, 3]), "column": np.array([1, 2]), "low": np.float32(LOWEST)}
    graph.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    assert optimized(graph, tmp_path).empty_rows == "nan"


def test_masks_that_kernels_see_keep_their_policy(tmp_path: Path) -> None:
    """Without bias and vectors there is nothing to prove: the host looks."""
    nodes = "s2 = Where (w, s1, low) p = Softmax <axis = -1> (s2)"
    graph = biased(nodes)
    del graph.graph.node[[n.output[0] for n in graph.graph.node].index("r8") :]
    graph.graph.node.extend(onnx.parser.parse_graph(f"g (float x) => (float y) {{ {nodes} out = MatMul (p, v) }}").node)
    assert optimized(graph, tmp_path).empty_rows == "mean"


def test_policies_that_are_asked_for_stay(tmp_path: Path) -> None:
    ignored = optimized(biased(), tmp_path, Options(ignore_empty_rows=True, verify_budget=5))
    assert ignored.empty_rows == "zero"
    optimized(biased(), tmp_path, Options(save_plan=tmp_path / "plan.json", verify_budget=5))
    text = (tmp_path / "plan.json").read_text()
    assert '"nan"' in text
    (tmp_path / "plan.json").write_text(text.replace('"nan"', '"mean"'))
    assert optimized(biased(), tmp_path, Options(plan=tmp_path / "plan.json", verify_budget=5)).empty_rows == "mean"


@pytest.mark.parametrize(("largest", "wanted"), [(8.0, "nan"), (1e5, "all")])
def test_halves(largest: float, wanted: str, tmp_path: Path) -> None:
    """Fills and tables of fp16 graphs: one that is stored in fp32 may overflow where it is cast."""
    half = convert_float_to_float16(biased(), disable_shape_infer=True, keep_io_types=False)
    table = next(t for t in half.graph.initializer if t.name == "table")
    wide = TABLE.copy()
    wide[-1, -1] = largest
    table.CopyFrom(numpy_helper.from_array(wide, "wide"))
    nodes = [onnx.helper.make_node("Cast", ["wide"], ["table"], to=TensorProto.FLOAT16), *half.graph.node]
    del half.graph.node[:]
    half.graph.node.extend(nodes)
    assert settled(half).empty_rows.value == wanted
    if wanted == "nan":
        assert optimized(half, tmp_path).empty_rows == wanted


@pytest.mark.parametrize(("last", "wanted"), [(1.0, "nan"), (-np.inf, "mean")])
def test_tables_in_files(last: float, wanted: str, tmp_path: Path) -> None:
    """Weights, of which nothing else is known, stay in their file, from where a bound is read."""
    table = np.concatenate([TABLE, np.full((64, 4), last, np.float32)])
    onnx.save(
        biased(WHERE, soft=np.float32(-1e9), table=table),
        str(tmp_path / "m.onnx"),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", Options(verify_budget=5))
    assert [(s.replaced, s.empty_rows) for s in report.sites] == [(True, wanted)]
    made = onnx.load(str(tmp_path / "o.onnx"), load_external_data=False)
    stored = next(t for t in made.graph.initializer if t.name == "table")
    assert stored.data_location == TensorProto.EXTERNAL


def _site(graph: onnx.ModelProto) -> tuple[AttentionSite, LiftedMask, RowProver]:
    symbolic = Symbolic(graph)
    (site,), _ = find_sites(graph, symbolic)
    return site, lift(symbolic, site), RowProver(MaskChecker(graph, symbolic))


def test_floors_and_selections_are_no_proof() -> None:
    site, mask, prover = _site(biased())
    assert prover.simplify_empty_rows(site, mask) != mask
    assert prover.simplify_empty_rows(replace(site, floored=True), mask) == mask, "rows of -inf are equal scores there"
    selecting = replace(mask, bias=(MaskTerm(TermKind.KEEP, mask.bias[0].tensor),))
    assert prover.simplify_empty_rows(site, selecting) == selecting, "a selection that stays a bias is one of -inf"
    several = replace(mask, bias=mask.bias * 2)
    assert prover.simplify_empty_rows(site, several) == several, "two of the lowest numbers add up to -inf"
    scaled = replace(mask, bias=(replace(mask.bias[0], scale=1.5),))
    assert prover.simplify_empty_rows(site, scaled) == scaled, "times a scale they are that, too"
