# SPDX-License-Identifier: Apache-2.0
"""The rules of the standard domain. A rule returns a fact for each output, or None where it knows nothing."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, numpy_helper

from stof.graph.external_data import is_external
from stof.symbolic.algebra.terms import integer
from stof.symbolic.facts import Fact, Rule, RuleContext, dtype_kind
from stof.symbolic.rules import bitwise, cast, comparison, counting, elementwise, movement, shape_only
from stof.symbolic.tensor import constant_tensor


def _constant(context: RuleContext) -> list[Fact]:
    for name, convert in (
        ("value_int", np.int64),
        ("value_float", np.float32),
        ("value_ints", np.int64),
        ("value_floats", np.float32),
    ):
        if name in context.attributes:
            array = np.array(context.attribute(name), dtype=convert)
            dtype = TensorProto.INT64 if convert is np.int64 else TensorProto.FLOAT
            break
    else:
        proto = context.attributes["value"].t
        if is_external(proto):  # external constants that remain are large
            return [Fact(proto.data_type, tuple(integer(n) for n in proto.dims), None, "a weight")]
        array, dtype = numpy_helper.to_array(proto), proto.data_type
        if dtype_kind(dtype) is None:
            return [Fact(dtype, tuple(integer(n) for n in array.shape))]
    tensor = constant_tensor(context.node.output[0], array)
    return [Fact(dtype, tensor.shape, tensor)]


RULES: dict[str, Rule] = {
    "Constant": _constant,
    **elementwise.RULES,
    **comparison.RULES,
    **cast.RULES,
    **movement.RULES,
    **shape_only.RULES,
    **counting.RULES,  # overrides CumSum of shape_only: it has a value
    **bitwise.RULES,
}
