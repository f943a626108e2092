# SPDX-License-Identifier: Apache-2.0
"""Finding attention: anchored at each Softmax, by data flow in both directions. No name is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx

from stof.errors import UnsupportedError
from stof.graph import GraphIndex
from stof.passes.views import Heads, as_heads, fold_output, scalar_factor
from stof.site import AttentionSite, Finding, Layout, MaskTerm, TermKind
from stof.symbolic import Symbolic

_PASS = frozenset({"Identity", "Dropout"})
_DEEPEST = 16


@dataclass
class _Scores:
    """What lies between the first MatMul and the softmax, collected from the softmax backwards."""

    query: str = ""
    key: str = ""
    factor: float = 1.0
    softcap: float = 0.0
    terms: list[MaskTerm] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def find_sites(model: onnx.ModelProto, symbolic: Symbolic) -> tuple[list[AttentionSite], list[Finding]]:
    """Every attention core of the main graph, and for every other Softmax the first obstacle."""
    index = GraphIndex(model.graph)
    sites: list[AttentionSite] = []
    findings: list[Finding] = []
    for node in model.graph.node:
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        name = node.name or f"softmax writing {node.output[0]}"
        try:
            sites.append(_match(index, symbolic, node, name, len(sites)))
        except UnsupportedError as error:
            findings.append(Finding(name, False, str(error)))
    return sites, findings


def _match(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto, name: str, number: int) -> AttentionSite:
    shape = symbolic.shape(softmax.output[0])
    if shape is None or len(shape) != 4:
        rank = "unknown rank" if shape is None else f"rank {len(shape)}"
        raise UnsupportedError(f"the softmax works on a tensor of {rank}, expected [B, H, S, T]")
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
    if axis % len(shape) != len(shape) - 1:
        raise UnsupportedError(f"the softmax runs along axis {axis}, expected the last")
    value_node, nan_guard = _forward(index, symbolic, softmax)
    scores = _Scores()
    if not _backward(index, symbolic, softmax.input[0], scores, 0):
        raise UnsupportedError(
            "no MatMul of a query and a key was found before the softmax; the walk met "
            f"{_op(index, softmax.input[0])}"
        )
    query = as_heads(index, symbolic, scores.query, transposed=False)
    key = as_heads(index, symbolic, scores.key, transposed=True)
    value = as_heads(index, symbolic, value_node.input[1], transposed=False)
    for heads, role in ((query, "query"), (key, "key"), (value, "value")):
        if heads is None:
            raise UnsupportedError(f"the {role} operand has no layout [batch, heads, length, size] of known heads and size")
    assert query is not None and key is not None and value is not None
    _check_heads(query, key, value)
    output = fold_output(index, symbolic, value_node.output[0])
    if output is None:
        raise UnsupportedError("the result of the second MatMul is not [B, H, S, D]")
    scale = scores.factor * query.scale * key.scale
    if not math.isfinite(scale):
        raise UnsupportedError(f"the scale of the scores is {scale}")
    if value.scale != 1.0:
        raise UnsupportedError(f"the values are scaled by {value.scale}")
    past = shape[3] - shape[2]
    offset = 1 if past.constant is None and all(c > 0 for _, c in past.terms) else 0
    return AttentionSite(
        name=name,
        index=number,
        softmax=softmax.output[0],
        query=query.operand,
        key=key.operand,
        value=value.operand,
        output=output[0],
        output_layout=output[1],
        num_heads=query.heads,
        kv_num_heads=key.heads,
        head_size=query.size,
        value_head_size=value.size,
        scale=scale,
        dtype=symbolic.dtype(query.operand.tensor),
        terms=tuple(reversed(scores.terms)),
        softcap=scores.softcap,
        nan_guard=nan_guard,
        query_offset=offset,
        scores_shape=(str(shape[0]), str(shape[1]), str(shape[2]), str(shape[3])),
        nodes=(softmax.name,),
        form=_form(scores, query, key, nan_guard, output[1]),
    )


def _check_heads(query: Heads, key: Heads, value: Heads) -> None:
    if query.repeat != 1:
        raise UnsupportedError("the query's heads are repeated")
    total = key.heads * key.repeat
    if key.heads != value.heads or key.repeat != value.repeat or total != query.heads:
        raise UnsupportedError(
            f"heads do not fit: query {query.heads}, key {key.heads} × {key.repeat}, value {value.heads} × {value.repeat}"
        )
    if key.size != query.size:
        raise UnsupportedError(f"query has head size {query.size}, key {key.size}")
    if max(query.size, value.size) > 256:
        raise UnsupportedError(f"head size {max(query.size, value.size)}, at most 256 is supported")


def _form(scores: _Scores, query: Heads, key: Heads, nan_guard: bool, output: Layout) -> str:
    words = list(dict.fromkeys(reversed(scores.words)))
    if query.scale != 1.0 and key.scale != 1.0:
        words.append("scale split over query and key")
    elif query.scale != 1.0 or key.scale != 1.0:
        words.append("scale on query" if query.scale != 1.0 else "scale on key")
    if key.repeat > 1:
        words.append(f"grouped heads × {key.repeat}")
    if nan_guard:
        words.append("NaN guard")
    return f"{query.operand.layout.value}/{key.operand.layout.value} -> {output.value}: " + ", ".join(words)


def _op(index: GraphIndex, tensor: str) -> str:
    node = index.producer(tensor)
    return f"tensor {tensor!r}" if node is None else f"{node.op_type} node {node.name!r}"


def _forward(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> tuple[onnx.NodeProto, bool]:
    """From the softmax to the MatMul with the values; (node, whether NaN rows become zero)."""
    tensor = softmax.output[0]
    guard = False
    for _ in range(_DEEPEST):
        if tensor in index.outputs or tensor in index.captured:
            raise UnsupportedError(f"the attention weights {tensor!r} are an output of the graph or of use elsewhere")
        users = [n for n in index.consumers(tensor) if n.op_type != "Shape"]
        if len(users) == 2 and {n.op_type for n in users} == {"IsNaN", "Where"}:
            tensor = _nan_guard(index, symbolic, tensor, users)
            guard = True
            continue
        if len(users) != 1:
            words = ", ".join(n.op_type for n in users) or "nothing"
            raise UnsupportedError(f"the attention weights {tensor!r} go to {words}, expected one MatMul with the values")
        user = users[0]
        if user.op_type == "MatMul" and user.input[0] == tensor and user.domain in ("", "ai.onnx"):
            return user, guard
        same = user.op_type == "Cast" and symbolic.dtype(user.output[0]) == symbolic.dtype(tensor)
        if user.op_type not in _PASS and not same:
            raise UnsupportedError(
                f"the attention weights go to {user.op_type} node {user.name!r}, expected a MatMul with the values"
            )
        tensor = user.output[0]
    raise UnsupportedError("no MatMul with the values was found after the softmax")


def _nan_guard(index: GraphIndex, symbolic: Symbolic, tensor: str, users: list[onnx.NodeProto]) -> str:
    test = next(n for n in users if n.op_type == "IsNaN")
    where = next(n for n in users if n.op_type == "Where")
    fill = symbolic.constant(where.input[1])
    good = where.input[0] == test.output[0] and where.input[2] == tensor and len(index.consumers(test.output[0])) == 1
    if not good or fill is None or bool(np.any(fill != 0)):
        raise UnsupportedError(f"Where node {where.name!r} after the softmax is no NaN guard")
    return where.output[0]


def _backward(index: GraphIndex, symbolic: Symbolic, tensor: str, scores: _Scores, depth: int) -> bool:
    """Collects what was done to the scores; True when the MatMul of query and key was reached."""
    node = index.producer(tensor)
    if node is None or depth > _DEEPEST:
        return False
    standard = node.domain in ("", "ai.onnx")
    if standard and node.op_type == "MatMul":
        scores.query, scores.key = node.input[0], node.input[1]
        return True
    if node.domain == "com.microsoft" and node.op_type == "FusedMatMul":
        return _fused_matmul(node, scores)
    if not standard:
        return False
    if node.op_type in _PASS:
        return _backward(index, symbolic, node.input[0], scores, depth + 1)
    if node.op_type == "Cast" and symbolic.dtype(node.input[0]) == symbolic.dtype(tensor):
        return _backward(index, symbolic, node.input[0], scores, depth + 1)
    if node.op_type == "Add":
        return _add(index, symbolic, node, scores, depth)
    if node.op_type == "Where":
        return _where(index, symbolic, node, scores, depth)
    factor = scalar_factor(symbolic, node)
    if factor is None:
        return False
    cap = _softcap(index, symbolic, factor)
    if cap is not None:
        if scores.factor != 1.0 or scores.softcap:
            return False
        scores.softcap = factor[1]
        terms = len(scores.terms)
        scores.words.append("softcap")
        # A mask below the tanh would be squashed with the scores: not what the op does.
        return _backward(index, symbolic, cap[0], _scaled(scores, cap[1]), depth + 1) and len(scores.terms) == terms
    scores.factor *= factor[1]
    scores.words.append("scale on scores")
    return _backward(index, symbolic, factor[0], scores, depth + 1)


def _scaled(scores: _Scores, factor: float) -> _Scores:
    scores.factor *= factor
    return scores


def _softcap(index: GraphIndex, symbolic: Symbolic, factor: tuple[str, float]) -> tuple[str, float] | None:
    """(x, s) of cap * tanh(x * s / cap)."""
    tanh = index.producer(factor[0])
    if tanh is None or tanh.op_type != "Tanh":
        return None
    inner = index.producer(tanh.input[0])
    found = None if inner is None else scalar_factor(symbolic, inner)
    return (tanh.input[0], factor[1]) if found is None else (found[0], found[1] * factor[1])


def _fused_matmul(node: onnx.NodeProto, scores: _Scores) -> bool:
    attributes = {a.name: a for a in node.attribute}
    if any(attributes[n].i for n in ("transA", "transBatchA", "transBatchB", "transB") if n in attributes):
        return False
    scores.query, scores.key = node.input[0], node.input[1]
    scores.factor *= attributes["alpha"].f if "alpha" in attributes else 1.0
    return True


def _add(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto, scores: _Scores, depth: int) -> bool:
    # The side that can be computed from shapes and inputs is the mask; two opaque sides are tried in turn.
    order = sorted((0, 1), key=lambda i: symbolic.value(node.input[i]) is not None)
    for i in order:
        if symbolic.value(node.input[i]) is not None:
            continue
        saved = (scores.factor, scores.softcap, len(scores.terms), len(scores.words))
        scores.terms.append(MaskTerm(TermKind.ADD, node.input[1 - i], None, scores.factor))
        scores.words.append("additive mask")
        if _backward(index, symbolic, node.input[i], scores, depth + 1):
            return True
        scores.factor, scores.softcap = saved[0], saved[1]
        del scores.terms[saved[2] :]
        del scores.words[saved[3] :]
    return False


def _where(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto, scores: _Scores, depth: int) -> bool:
    for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
        fill = symbolic.constant(node.input[filled])
        if fill is None or fill.size != 1:
            continue
        number = float(fill.reshape(())) * scores.factor
        if number > -1e4:
            raise UnsupportedError(f"Where node {node.name!r} fills masked scores with {number}, expected at most -1e4")
        scores.terms.append(MaskTerm(kind, node.input[0], number))
        scores.words.append("Where mask")
        return _backward(index, symbolic, node.input[kept], scores, depth + 1)
    return False
