# SPDX-License-Identifier: Apache-2.0
"""The mask function of a FlexAttention ``BlockMask`` as a mask expression.

The function is traced to a graph of aten operators on four integers. Their values are computed in the algebra of
``stof.symbolic``, which also reads the masks of ONNX graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from stof.errors import UnsupportedError, shown
from stof.mask.expression import MaskExpression
from stof.mask.from_condition import B, GraphNames, H, K, Q, to_expression
from stof.symbolic.algebra.conditions import all_of, any_of, equal, less_equal, negate, select
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.int_bounds import rebuild
from stof.symbolic.algebra.terms import FALSE, TRUE, Cond, Int, integer, of_atom

MOST_TABLE_ELEMENTS = 1 << 28


def trace_mask_mod(mask_mod: Callable[..., Any], device: Any) -> tuple[MaskExpression, dict[str, np.ndarray]]:
    """The expression of a function of (b, h, q, k), and the tables that it reads.

    Tensors that the function captures become tables with their present content; numbers become constants.

    Raises:
        UnsupportedError: naming the operator that no expression has, or why the function cannot be traced.
    """
    try:
        module = make_fx(_by_tensors(mask_mod))(*(torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)))
    except Exception as error:  # whatever the user's function and PyTorch raise
        raise UnsupportedError(
            f"the mask function cannot be traced, as one that branches on its indices in Python: {error}"
        ) from error
    tracer = _Tracer(module)
    condition = tracer.result()
    names = GraphNames({}, _no_operand, lambda name: tracer.constants[name])
    expression = to_expression(condition, names)
    return expression, {name: _as_table(array) for name, array in names.tables.items()}


class _IndexByTensors(TorchFunctionMode):  # type: ignore[misc]  # of Any, where PyTorch is missing
    """Looks elements up by ``aten.index``: Python's subscript would ask for the values of the indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, subscript = args
            indices = subscript if isinstance(subscript, tuple) else (subscript,)
            scalars = all(_is_scalar_index(i) for i in indices)
            if scalars and any(isinstance(i, torch.Tensor) for i in indices):
                return torch.ops.aten.index(tensor, [torch.as_tensor(i, device=tensor.device) for i in indices])
        return func(*args, **(kwargs or {}))


def _is_scalar_index(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return bool(index.dim() == 0 and index.dtype != torch.bool)
    return isinstance(index, int) and not isinstance(index, bool)


def _by_tensors(mask_mod: Callable[..., Any]) -> Callable[..., Any]:
    def call_mask_mod(*indices: Any) -> Any:
        with _IndexByTensors():
            return mask_mod(*indices)

    return call_mask_mod


def read_tensor(tensor: Any) -> np.ndarray:
    """The content of a tensor that a BlockMask holds.

    Raises:
        UnsupportedError: where it has none that can be read: on meta, or within a transform of ``torch.func``.
    """
    try:
        array: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedError(
            f"a BlockMask holds a {type(tensor).__name__} on {tensor.device} that cannot be read: {shown(error, 300)}; make the "
            "BlockMask, and call stof.torch.from_block_mask, outside of transforms of torch.func and of fake tensors; what "
            "differs from call to call is given as pad, segment_q, segment_k, lengths or tables of a mask expression"
        ) from error
    return array


def _no_operand(tensor: str, *_: object) -> tuple[str, int | None]:
    raise AssertionError(tensor)  # the algebra's values hold no input of a run


def _as_table(array: np.ndarray) -> np.ndarray:
    """The array in a type that tables have."""
    if array.dtype in (np.bool_, np.uint8, np.int32, np.int64):
        return array
    return array.astype(np.int64)


class _Tracer:
    """Values of the nodes of a traced function: integers, conditions, or the captured tensors themselves."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.constants: dict[str, np.ndarray] = {}
        self.values: dict[Any, Any] = {}

    def result(self) -> Cond:
        indices = iter((B, H, Q, K))
        for node in self.module.graph.nodes:
            match node.op:
                case "placeholder":
                    self.values[node] = next(indices)
                case "get_attr":
                    self.values[node] = self._read_captured(node.target)
                case "call_function":
                    self.values[node] = self._call(node)
                case "output":
                    return _condition(self._value(node.args[0]))
                case _:
                    raise UnsupportedError(
                        f"the mask function has a {node.op} {node.target}, of which no expression is known"
                    )
        raise AssertionError("a traced function has an output")

    def _read_captured(self, name: str) -> Any:
        owner = self.module
        *path, last = name.split(".")
        for step in path:
            owner = getattr(owner, step)
        tensor = getattr(owner, last).detach()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise UnsupportedError(f"the mask function reads a tensor of {tensor.dtype}; expected integers or booleans")
        if tensor.numel() > MOST_TABLE_ELEMENTS:
            raise UnsupportedError(
                f"the mask function reads a tensor of {tensor.numel()} elements, expected at most 2^28"
            )
        array = read_tensor(tensor)
        if tensor.dim() == 0:
            return _scalar(array.item())
        self.constants[name] = array
        return _Captured(name, tuple(tensor.shape), tensor.dtype == torch.bool)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, bool | int):
            return _scalar(argument)
        return argument

    def _call(self, node: Any) -> Any:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        arguments = [
            self._value(a) if not isinstance(a, list | tuple) else [self._value(x) for x in a] for a in node.args
        ]
        if name in _OPERATORS:
            return _OPERATORS[name](*[a for a in arguments if not isinstance(a, float) or _refuse(node, a)])
        match name:
            case "div":
                return self._divide(node, arguments)
            case "index":
                return self._index(node, arguments)
            case "select":
                return self._select(node, arguments)
            case "full" | "new_full" | "scalar_tensor":
                return _scalar(node.args[-1]) if isinstance(node.args[-1], bool | int) else _refuse(node, node.args[-1])
            case "ones" | "new_ones" | "ones_like":
                return self._make_filled(node, 1)
            case "zeros" | "new_zeros" | "zeros_like":
                return self._make_filled(node, 0)
            case "_to_copy" | "to":
                return self._cast(node, arguments[0])
        return _refuse(node, name)

    def _make_filled(self, node: Any, number: int) -> Any:
        value = node.meta["tensor_meta"] if "tensor_meta" in node.meta else node.meta.get("val")
        is_condition = value is not None and value.dtype == torch.bool
        return _scalar(bool(number) if is_condition else number)

    def _cast(self, node: Any, value: Any) -> Any:
        dtype = node.kwargs.get("dtype")
        if isinstance(value, _Captured):
            return _refuse(node, "a cast of a whole captured tensor")
        if dtype is None or dtype in (torch.int32, torch.int64):
            return value if dtype is None else _number(value)
        return _condition(value) if dtype == torch.bool else _refuse(node, f"a cast to {dtype}")

    def _divide(self, node: Any, arguments: Sequence[Any]) -> Any:
        if node.kwargs.get("rounding_mode") != "floor":
            return _refuse(node, f"a division with rounding_mode {node.kwargs.get('rounding_mode')}, expected floor,")
        return _floor_divide(*arguments)

    def _index(self, node: Any, arguments: Sequence[Any]) -> Any:
        tensor, indices = arguments
        if not isinstance(tensor, _Captured) or any(not isinstance(i, Int) for i in indices):
            return _refuse(node, "an index that is no list of integers")
        return tensor.at(indices)

    def _select(self, node: Any, arguments: Sequence[Any]) -> Any:
        tensor, axis, index = arguments
        if isinstance(tensor, _Captured) and axis.constant == 0 and isinstance(index, Int):
            return tensor.at([_from_end(index, tensor.shape[0])])
        return _refuse(node, "a selection along another axis than the first")


class _Captured:
    """A captured tensor of which the first axes have indices."""

    def __init__(self, name: str, shape: tuple[int, ...], is_condition: bool, indices: tuple[Int, ...] = ()) -> None:
        self.name, self.shape, self.is_condition, self.indices = name, shape, is_condition, indices

    def at(self, indices: Sequence[Int]) -> Any:
        if len(indices) > len(self.shape):
            raise UnsupportedError(
                f"the mask function has {len(indices)} indices for a tensor of shape {list(self.shape)}"
            )
        full_indices = self.indices + tuple(_from_end(i, n) for i, n in zip(indices, self.shape, strict=False))
        rest = self.shape[len(indices) :]
        if rest:
            return _Captured(self.name, rest, self.is_condition, full_indices)
        return (
            Cond("table", (self.name, full_indices)) if self.is_condition else of_atom("table", self.name, full_indices)
        )


def _from_end(index: Int, size: int) -> Int:
    """A constant index, of which a negative one counts from the end."""
    number = index.constant
    return integer(number + size) if number is not None and number < 0 else index


def _refuse(node: Any, what: object) -> Any:
    raise UnsupportedError(f"the mask function uses {what} in {node.format_node()}, of which no expression is known")


def _scalar(value: bool | int) -> Int | Cond:
    if isinstance(value, bool):
        return TRUE if value else FALSE
    return integer(int(value))


def _condition(value: Any) -> Cond:
    """The value as a condition: an integer that is not 0."""
    if isinstance(value, Cond):
        return value
    if isinstance(value, Int):
        return negate(equal(value, integer(0)))
    raise UnsupportedError("the mask function gives a whole captured tensor, expected one element")


def _number(value: Any) -> Int:
    """The value as an integer: 1 where a condition holds."""
    if isinstance(value, Int):
        return value
    if isinstance(value, Cond):
        return integer(1) if value == TRUE else integer(0) if value == FALSE else of_atom("bool", value)
    raise UnsupportedError("the mask function computes with a whole captured tensor, expected one element")


def _divisor(value: Any) -> int:
    number = _number(value).constant
    if not number:
        raise UnsupportedError(
            "the mask function divides by what is no constant besides 0, of which no expression is known"
        )
    return number


def _floor_divide(left: Any, right: Any) -> Int:
    number = _divisor(right)
    return floor_div(_number(left), number) if number > 0 else floor_div(-_number(left), -number)


def _remainder(left: Any, right: Any) -> Int:
    number = _divisor(right)
    return floor_mod(_number(left), number) if number > 0 else -floor_mod(-_number(left), -number)


def _bitwise(unite: Callable[[Sequence[Cond]], Cond]) -> Callable[[Any, Any], Cond]:
    def apply(left: Any, right: Any) -> Cond:
        if isinstance(left, Int) or isinstance(right, Int):
            raise UnsupportedError("the mask function uses bits of integers, of which no expression is known")
        return unite([_condition(left), _condition(right)])

    return apply


def _not_equal(left: Any, right: Any) -> Cond:
    return negate(_equal(left, right))


def _equal(left: Any, right: Any) -> Cond:
    if isinstance(left, Cond) and isinstance(right, Cond):
        return negate(_exclusive_or([left, right]))
    return equal(_number(left), _number(right))


def _exclusive_or(sides: Sequence[Cond]) -> Cond:
    left, right = sides
    return any_of([all_of([left, negate(right)]), all_of([negate(left), right])])


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Cond) and isinstance(no, Cond):
        return select(_condition(condition), yes, no)
    return select(_condition(condition), _number(yes), _number(no))


def _clamp(value: Any, low: Any = None, high: Any = None) -> Int:
    number = _number(value)
    if low is not None:
        number = rebuild("max", (number, _number(low)))
    return number if high is None else rebuild("min", (number, _number(high)))


def _bitwise_not(value: Any) -> Cond:
    if isinstance(value, Int):
        raise UnsupportedError("the mask function uses bits of integers, of which no expression is known")
    return negate(_condition(value))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _number(a) + _number(b),
    "sub": lambda a, b: _number(a) - _number(b),
    "rsub": lambda a, b: _number(b) - _number(a),
    "mul": lambda a, b: _number(a) * _number(b),
    "neg": lambda a: -_number(a),
    "abs": lambda a: rebuild("abs", (_number(a),)),
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "minimum": lambda a, b: rebuild("min", (_number(a), _number(b))),
    "maximum": lambda a, b: rebuild("max", (_number(a), _number(b))),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "le": lambda a, b: less_equal(_number(a), _number(b)),
    "ge": lambda a, b: less_equal(_number(b), _number(a)),
    "lt": lambda a, b: negate(less_equal(_number(b), _number(a))),
    "gt": lambda a, b: negate(less_equal(_number(a), _number(b))),
    "eq": _equal,
    "ne": _not_equal,
    "logical_and": lambda a, b: all_of([_condition(a), _condition(b)]),
    "logical_or": lambda a, b: any_of([_condition(a), _condition(b)]),
    "logical_xor": lambda a, b: _exclusive_or([_condition(a), _condition(b)]),
    "logical_not": lambda a: negate(_condition(a)),
    "bitwise_and": _bitwise(all_of),
    "bitwise_or": _bitwise(any_of),
    "bitwise_xor": _bitwise(_exclusive_or),
    "bitwise_not": _bitwise_not,
    "where": _where,
    "view": lambda a, _: a,
    "expand": lambda a, *_: a,
    "alias": lambda a: a,
    "clone": lambda a: a,
    "detach": lambda a: a,
    "lift_fresh_copy": lambda a: a,
    "squeeze": lambda a: a,
}
