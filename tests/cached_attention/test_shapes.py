# SPDX-License-Identifier: Apache-2.0
"""What the symbolic shapes say of StofCachedAttention, beside what the operator gives."""

from __future__ import annotations

import onnx
import pytest
from gqa_models import Shape, draw_step, feeds_of, model_of, session

from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.symbolic import Symbolic


def emitted(model: onnx.ModelProto) -> onnx.ModelProto:
    sites = [c.site for c in find_candidates(model, Symbolic(model), "cpu")]
    found = emit_caches(model, [s for s in sites if s is not None])
    del found.graph.output[1:]
    for output in found.graph.output:
        output.type.tensor_type.ClearField("shape")
    return found


def shapes_of(model: onnx.ModelProto) -> list[list[str] | None]:
    symbolic = Symbolic(model)
    outputs = model.graph.node[-1].output
    found = [symbolic.shape(o) for o in outputs]
    assert {symbolic.dtype(o) for o in outputs} == {symbolic.dtype("query")}
    return [None if shape is None else [str(d) for d in shape] for shape in found]


@pytest.mark.parametrize("packed", [False, True])
def test_output(packed: bool) -> None:
    output, *present = shapes_of(emitted(model_of(Shape(H=6, G=2, D=32, packed=packed), masks=True)))
    assert output == ["1*size(B)", "1*size(S)", "192"]
    assert present == [None, None]  # the larger of capacity and total


def test_present() -> None:
    """Known where the cache slides, or where its rows and the total are numbers."""
    _, *present = shapes_of(emitted(model_of(Shape(window=6, sliding=True), masks=True)))
    assert present == [["1*size(B)", "2", "1*size(C)", "16"]] * 2
    for capacity, total, rows in ((12, 20, 20), (24, 20, 24)):
        model = model_of(Shape(), capacity=capacity, masks=True)
        value = next(i for i in model.graph.input if i.name == "attention_mask")
        value.type.tensor_type.shape.dim[1].dim_value = total
        made = emitted(model)
        _, *present = shapes_of(made)
        assert present == [["1*size(B)", "2", str(rows), "16"]] * 2


def test_the_operator_gives_these_shapes() -> None:
    shape = Shape(H=6, G=2, D=32, packed=True)
    model = model_of(shape)
    sites = [c.site for c in find_candidates(model, Symbolic(model), "cpu")]
    made = session(emit_caches(model, [s for s in sites if s is not None]), library=True)
    for lengths, queries, capacity in (([9, 4], 9, 12), ([13, 5], 1, 12), ([13, 5], 1, 20)):
        found = made.run(None, feeds_of(shape, draw_step(shape, lengths, queries, capacity)))
        rows = max(capacity, max(lengths))
        assert [x.shape for x in found] == [(2, queries, 192), (2, 2, rows, 32), (2, 2, rows, 32)]
