# SPDX-License-Identifier: Apache-2.0
"""The abstract interpreter: computes a fact (type, shape, value) for every tensor in one pass over the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.external_data import is_external
from stof.graph.index import STANDARD_DOMAINS, all_nodes, is_standard
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.equations import SolvedSizes, solve_equations, substitute
from stof.symbolic.algebra.overflow import guard_overflow
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import Int, integer, subterms, to_real, var
from stof.symbolic.body_inputs import find_body_inputs
from stof.symbolic.facts import Fact, Rule, RuleContext, dtype_kind
from stof.symbolic.forced_sizes import find_forced_sizes
from stof.symbolic.lookup_limits import find_lookup_limits, find_slice_limits
from stof.symbolic.onnx_inference import OnnxInference
from stof.symbolic.rules import channel_blocks, contrib, fused_attention, quantized, standard, stof_ops
from stof.symbolic.stated_facts import (
    add_declared,
    read_declared_shape,
    read_initializer,
    replace_sizes,
)
from stof.symbolic.tensor import (
    EQUALS,
    Shape,
    SymTensor,
    computed_tensor,
    constant_tensor,
    input_tensor,
    kind_of,
)

# Operators over whole axes: their result is no function of one input element. From inputs with values they make a tensor
# that is computed at run time, and that later values read by name like a model input.
_REDUCING = frozenset(
    {"CumSum", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceMean", "ArgMax", "ArgMin", "TopK", "OneHot"}
)
_LARGEST_RUN = 1 << 22  # most elements of constants that are computed by running a node
_SUBGRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
# Operators whose result may differ from run to run. A Dropout that drops nothing has a rule.
_RANDOM = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})
_UNKNOWN_KINDS = frozenset({"opaque", "unopaque", "trunc"})
# Operators whose result may be too large for its type.
_COMPUTING = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Abs", "Pow", "Sum", "Range", "CumSum", "Cast", "CastLike", "BitShift"}
)


@dataclass(frozen=True)
class InnerEqualities:
    """Sizes that are equal in every valid run that takes a branch of an If, or enters the body of a Loop or Scan.

    Attributes:
        conditions: what the branches around are taken for: the tensors that decide, and their values.
        pairs: of sizes.
    """

    conditions: tuple[tuple[str, bool], ...]
    pairs: tuple[tuple[Int, Int], ...]


class Symbolic:
    """Symbolic shapes and values of every tensor of a model.

    ``shape(name)`` has a polynomial for each axis, over the model's dimension names; an axis without a name gets the name
    ``tensor#axis``. Sizes are at least 1. ``value(name)`` is a function of the indices, for tensors that depend on shapes,
    constants and elements of model inputs only. Outputs of compute nodes (MatMul, Softmax, ...) have shapes but no value.
    Initializers that are also graph inputs count as inputs, since a caller can override them.

    Args:
        model: without external data.
        inlined: the same model with all functions inlined; gives the shapes of what function calls return.
        exact: sizes are those of every run. Else two names that are broadcast count as equal, and slices of fixed positions lie
            within their axis: so it is where masks are.
        rules: of further operators of domain stof, by their names.
        vectors: treat integer and boolean vectors [B, length], [length] or [B] that are computed from input data as if
            they were inputs, however they are computed.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inlined: Symbolic | None = None,
        *,
        vectors: bool = False,
        exact: bool = False,
        rules: Mapping[str, Rule] = MappingProxyType({}),
    ) -> None:
        self._facts: dict[str, Fact] = {}
        self._inlined = inlined
        self._onnx = OnnxInference(model.opset_import, model.ir_version)
        self._exact = exact
        standard_rules = standard.RULES | fused_attention.STANDARD | quantized.STANDARD
        self._rules = {
            **dict.fromkeys(STANDARD_DOMAINS, standard_rules),
            "ai.onnx.preview": fused_attention.PREVIEW,
            "com.microsoft": contrib.RULES | fused_attention.CONTRIB | quantized.CONTRIB,
            "com.microsoft.nchwc": channel_blocks.RULES,
            "stof": stof_ops.RULES | dict(rules),
        }
        self._declared = {v.name: v.type.tensor_type for v in (*model.graph.value_info, *model.graph.output)}
        self._equalities: dict[tuple[Int, Int], bool] = {}  # whether a node fails else
        self.inner_equalities: list[InnerEqualities] = []
        self._conditions: tuple[tuple[str, bool], ...] = ()  # of the branches around the node that is visited
        self.running_sums: dict[str, str] = {}  # output of an inclusive CumSum along the last axis: its input
        self._opset = next((o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS), 13)
        self._model = model
        self._vectors = vectors
        self._coarse: Symbolic | None = None
        self._forced: dict[Int, Int] = {}
        self._interpret()
        self._forced = find_forced_sizes(model.graph, self._facts)
        if self._forced:
            self._interpret()

    def _interpret(self) -> None:
        graph = self._model.graph
        self._facts.clear()
        self._equalities.clear()
        self.inner_equalities.clear()
        self.running_sums.clear()
        self._read_graph(graph)
        self._batches = {
            f.shape[0] for i in graph.input if (f := self._facts[i.name]).shape is not None and len(f.shape) > 1
        }
        for node in graph.node:
            self._visit(node)

    def _read_graph(self, graph: onnx.GraphProto) -> None:
        overridable = {i.name for i in graph.input}
        for value in graph.input:
            tensor = value.type.tensor_type
            shape = read_declared_shape(value.name, tensor)
            kind = dtype_kind(tensor.elem_type)
            symbolic_tensor = input_tensor(value.name, shape, kind) if shape is not None and kind else None
            self._facts[value.name] = Fact(tensor.elem_type, shape, symbolic_tensor)
        for initializer in graph.initializer:
            if initializer.name not in overridable:
                self._facts[initializer.name] = read_initializer(initializer)

    def _visit(self, node: onnx.NodeProto) -> None:
        if node.op_type == "If" and is_standard(node):
            self._visit_branches(node)
            return
        context = RuleContext(self._facts, node, self._opset, self._equalities, is_exact=self._exact)
        rule = self._rules.get(node.domain, {}).get(node.op_type)
        rule_facts = None
        reason = ""
        if rule is None:
            reason = f"no symbolic rule for {node.domain + '::' if node.domain else ''}{node.op_type}"
        else:
            try:
                made = [_guard_fact(node, fact) for fact in rule(context) or []]
                rule_facts = [_fold_fact(name, fact) for name, fact in zip(node.output, made, strict=False)]
            except (ValueError, IndexError, TypeError, KeyError, ArithmeticError, MemoryError) as error:
                reason = f"{node.op_type} {node.name!r}: {error}"
        inferred = self._infer_by_onnx(node, rule is None, rule_facts)
        if node.op_type in ("Loop", "Scan") and is_standard(node):
            self._visit_body(node, inferred or [])
        for i, name in enumerate(node.output):
            if not name:
                continue
            fact = rule_facts[i] if rule_facts is not None and i < len(rule_facts) else Fact()
            if rule is None and self._inlined is not None:
                fact = Fact(self._inlined.dtype(name), self._inlined.shape(name))
            if fact.shape is None and inferred is not None:
                fact = Fact(fact.dtype or inferred[i].dtype, inferred[i].shape)
            if name in self._declared:
                fact = add_declared(fact, name, self._declared[name])
            if self._forced and fact.shape is not None:
                fact = replace_sizes(fact, self._forced)
            # So is the result of a Reshape, of which no one knows how its axes come of the others.
            if fact.value is None and node.op_type in _REDUCING | {"Reshape"}:
                fact = self._runtime_fact(name, node, fact)
                if node.op_type == "CumSum" and _is_running_sum(context):
                    self.running_sums[name] = node.input[0]
            if self._vectors and i == 0 and (fact.value is None or not fact.value.is_constant):
                fact = self._run_on_constants(name, node) or fact
            if self._vectors and self._is_vector(fact):
                assert fact.shape is not None
                assert fact.value is not None
                # Padding with ones before it counts as 0 and 1, as padding itself does.
                tensor = input_tensor if _is_zero_or_one(fact.value) else computed_tensor
                fact = replace(fact, value=tensor(name, fact.shape, fact.value.kind))
            if fact.value is None:
                causes = [
                    self._facts[n].reason for n in node.input if n in self._facts and self._facts[n].value is None
                ]
                fact = Fact(fact.dtype, fact.shape, None, reason or next((c for c in causes if c), "") or node.op_type)
            self._facts[name] = fact

    def _infer_by_onnx(self, node: onnx.NodeProto, no_rule: bool, rule_facts: list[Fact] | None) -> list[Fact] | None:
        """ONNX's facts of a node without a rule, or whose rule knows no shape although the shapes of all inputs are known."""
        if not no_rule:
            needed = [i for i, name in enumerate(node.output) if name]
            if rule_facts is not None and all(i < len(rule_facts) and rule_facts[i].shape is not None for i in needed):
                return None
            if any(n and (n not in self._facts or self._facts[n].shape is None) for n in node.input):
                return None
        return self._onnx.infer(node, self._facts)

    def _visit_branches(self, node: onnx.NodeProto) -> None:
        """The facts of an If: those of its branch where the condition is constant, else the shapes that both branches share."""
        branches = {a.name: a.g for a in node.attribute}
        condition = self.constant(node.input[0])
        taken = None if condition is None or condition.size != 1 else bool(condition.reshape(-1)[0])
        branch_facts = []
        for name, chosen in (("then_branch", True), ("else_branch", False)):
            if name not in branches or taken not in (None, chosen):
                continue
            for initializer in branches[name].initializer:
                self._facts[initializer.name] = read_initializer(initializer)
            equalities_before, conditions = dict(self._equalities), self._conditions
            self._conditions += ((node.input[0], chosen),) if taken is None else ()
            for inner in branches[name].node:
                self._visit(inner)
            if taken is None:  # a branch that is not taken may have unequal sizes
                branch_equalities = tuple(pair for pair in self._equalities if pair not in equalities_before)
                self.inner_equalities += (
                    [InnerEqualities(self._conditions, branch_equalities)] if branch_equalities else []
                )
                self._equalities.clear()
                self._equalities.update(equalities_before)
            self._conditions = conditions
            branch_facts.append([self._facts.get(o.name, Fact()) for o in branches[name].output])
        for i, output in enumerate(node.output):
            facts = [f[i] for f in branch_facts if i < len(f)]
            if not output:
                continue
            if taken is not None and len(facts) == 1:
                self._facts[output] = facts[0]
                continue
            same = len({(f.dtype, f.shape) for f in facts}) == 1
            fact = replace(facts[0], value=None, reason="If") if same else Fact(reason="If")
            if fact.shape is None and output in self._declared:
                declared = self._declared[output]
                fact = Fact(declared.elem_type, read_declared_shape(output, declared), None, "If")
            self._facts[output] = fact

    def _visit_body(self, node: onnx.NodeProto, inferred: list[Fact]) -> None:
        """The facts inside of a Loop or Scan, of which only the sizes that they tie are known outside."""
        body = next((a.g for a in node.attribute if a.name == "body"), None)
        carried = find_body_inputs(node, self._facts, inferred)
        if body is None or len(body.input) != len(carried):
            return
        # Names of the body may be names outside, too, which keep their facts.
        names = {n for inner in all_nodes(body.node) for n in inner.output}
        names |= {v.name for v in body.input} | {t.name for t in body.initializer}
        outside = {n: self._facts[n] for n in names if n in self._facts}
        self._facts |= {v.name: fact for v, fact in zip(body.input, carried, strict=True)}
        self._facts |= {t.name: read_initializer(t) for t in body.initializer}
        equalities_before = dict(self._equalities)
        for inner in body.node:
            self._visit(inner)
        body_equalities = tuple(pair for pair in self._equalities if pair not in equalities_before)
        self.inner_equalities += [InnerEqualities(self._conditions, body_equalities)] if body_equalities else []
        self._equalities = equalities_before
        self._facts |= outside

    def _runtime_fact(self, name: str, node: onnx.NodeProto, fact: Fact) -> Fact:
        """The fact of a tensor that is computed at run time from tensors with values."""
        kind = dtype_kind(fact.dtype)
        has_values = all(n in self._facts and self._facts[n].value is not None for n in node.input if n)
        if kind is None or fact.shape is None or not has_values:
            return fact
        return replace(fact, value=computed_tensor(name, fact.shape, kind))

    def _run_on_constants(self, name: str, node: onnx.NodeProto) -> Fact | None:
        """The constant result of a node with constant inputs, computed by running it; None where it has others or is large."""
        input_names = {n for n in node.input if n}
        if not input_names or not all(self.is_constant(n) for n in input_names):
            return None
        if sum(_count(self._facts[n]) for n in input_names) > _LARGEST_RUN:
            return None
        if not is_standard(node) or any(a.type in _SUBGRAPHS for a in node.attribute):
            return None
        if node.op_type in _RANDOM or any(is_external(a.t) for a in node.attribute if a.HasField("t")):
            return None
        from onnx.reference import ReferenceEvaluator

        arrays = {n: a for n in node.input if (a := self.constant(n)) is not None}
        inputs = [helper.make_tensor_value_info(n, self.dtype(n), a.shape) for n, a in arrays.items()]
        output = helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
        graph = helper.make_graph([node], "constant", inputs, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)])
        try:
            with np.errstate(all="ignore"):
                (result,) = ReferenceEvaluator(model).run([name], arrays)
        except Exception:  # the evaluator may raise anything; the value is unknown then
            return None
        array = np.asarray(result)
        if array.size > _LARGEST_RUN or array.dtype.kind not in "biuf":
            return None
        tensor = constant_tensor(name, array)
        return Fact(helper.np_dtype_to_tensor_dtype(array.dtype), tensor.shape, tensor)

    def _is_vector(self, fact: Fact) -> bool:
        """Whether a tensor is an integer or boolean vector of input data: [length], [B] or [B, length].

        A function of one element of another vector does not count: it keeps its value.
        """
        value = fact.value
        if value is None or value.kind == "f" or value.is_constant or fact.shape is None:
            return False
        long = [d for d in fact.shape if d.constant != 1]
        if len(long) > 2 or (len(long) == 2 and (long[0] not in self._batches or long[1] == long[0])):
            return False
        probe = tuple(integer(0) if d.constant == 1 else var(f"any{i}") for i, d in enumerate(fact.shape))
        terms = list(subterms(value.at(probe)))
        reads = {p.args[:2] for p in terms if p.kind in ("read", "unread")}
        plain = {v for v in probe if v.constant is None}
        indices = {i for _, read_index in reads if isinstance(read_index, tuple) for i in read_index if i.constant != 0}
        single = len(reads) == 1 and indices == plain
        return bool(reads) and not (single and not any(p.kind in _UNKNOWN_KINDS for p in terms))

    def apply_rule(
        self, node: onnx.NodeProto, overrides: Mapping[str, Fact], *, domain: Domain | None = None
    ) -> list[Fact] | None:
        """The facts of a standard node's outputs with other facts for some inputs; None where the operator has no rule.

        With a ``domain`` of index variables, indices that a Reshape divides by a size may depend on conditions.
        """
        rule = self._rules[""].get(node.op_type) if is_standard(node) else None
        facts = {
            n: overrides[n] if n in overrides else self._facts[n]
            for n in node.input
            if n in overrides or n in self._facts
        }
        context = RuleContext(
            facts,
            node,
            self._opset,
            dict(self._equalities),
            is_exact=self._exact,
            domain=domain,
        )
        return None if rule is None else rule(context)

    @property
    def coarse(self) -> Symbolic:
        """The same model interpreted with ``vectors``: computed vectors count as inputs."""
        if self._coarse is None:
            self._coarse = self if self._vectors else Symbolic(self._model, self._inlined, vectors=True)
        return self._coarse

    @cached_property
    def lookup_limits(self) -> tuple[tuple[Int, Int], ...]:
        """Pairs of sizes of which the first is at most the second in every valid run: positions and rows of their tables."""
        return find_lookup_limits(all_nodes(self._model.graph.node), self)

    @cached_property
    def slice_limits(self) -> tuple[tuple[Int, Int], ...]:
        """Likewise of ends of slices, beyond which a run gets less than it asks for."""
        return find_slice_limits(all_nodes(self._model.graph.node), self)

    def canonicalize(self, size: Int) -> Int:
        """A size with one dimension, or number, for all that have to be equal for the graph's nodes to run."""
        return substitute(size, self._solved.values)

    @cached_property
    def _solved(self) -> SolvedSizes:
        return solve_equations([pair for pair, is_forced in self._equalities.items() if is_forced], ())

    @property
    def equalities(self) -> list[tuple[Int, Int]]:
        """Pairs of different size expressions that are equal in every valid run (``past + sequence`` and ``total``)."""
        return list(self._equalities)

    def dtype(self, name: str) -> int:
        """The ONNX element type, 0 when unknown."""
        return self._facts.get(name, Fact()).dtype

    def shape(self, name: str) -> Shape | None:
        """The symbolic shape."""
        return self._facts.get(name, Fact()).shape

    def value(self, name: str) -> SymTensor | None:
        """The tensor as a function of its indices."""
        return self._facts.get(name, Fact()).value

    def reason(self, name: str) -> str:
        """Why ``value`` is None: the operator without a symbolic value."""
        return self._facts.get(name, Fact()).reason

    def is_constant(self, name: str) -> bool:
        """Whether a tensor depends on neither sizes nor inputs, and its value is known."""
        fact = self._facts.get(name)
        return fact is not None and fact.value is not None and fact.value.is_constant

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a tensor that does not depend on sizes and inputs."""
        base, derived, value = name.partition(EQUALS)
        if derived:
            array = self.constant(base)
            return None if array is None else np.asarray(array == float(value))
        fact = self._facts.get(name)
        return None if fact is None or fact.value is None else fact.value.constant

    def uniform(self, name: str) -> float | None:
        """The number that all elements of a tensor are equal to; None where there is no such number or none is known."""
        array = self.constant(name)
        if array is not None:
            # NumPy has no kind for bfloat16: ml_dtypes gives it "V".
            if array.size == 0 or array.dtype.kind not in "fiuV" or not bool(np.all(array == array.reshape(-1)[0])):
                return None
            return float(array.reshape(-1)[0])
        value = self.value(name)
        if value is None or value.kind == "b":
            return None
        element = value.at(tuple(var(f"any{i}") for i in range(value.rank)))
        if isinstance(element, Int):
            return None if element.constant is None else float(element.constant)
        return float(str(element.args[0])) if element.kind == "const" else None


def _is_zero_or_one(value: SymTensor) -> bool:
    """Whether integers are 0 or 1 where integer inputs are."""
    if value.kind != "i":
        return False
    element = value.at(tuple(var(f"any{i}") for i in range(value.rank)))
    return {x for _, x in split_cases(to_real(element))} <= {0.0, 1.0}


def _is_running_sum(context: RuleContext) -> bool:
    """Whether a CumSum is inclusive and runs forwards along the last axis."""
    axis, shape = context.fixed_ints(1), context.shape(0)
    plain = not context.number("exclusive", 0) and not context.number("reverse", 0)
    return plain and bool(axis) and shape is not None and axis is not None and axis[0] % len(shape) == len(shape) - 1


def _count(fact: Fact) -> int:
    """The number of elements of a constant."""
    sizes = None if fact.value is None else fact.value.sizes()
    return 0 if sizes is None else math.prod(sizes)


def _guard_fact(node: onnx.NodeProto, fact: Fact) -> Fact:
    """The fact with a value that is unknown where the type would overflow. Casts to floats round instead."""
    whole = node.op_type not in ("Cast", "CastLike") or dtype_kind(fact.dtype) == "i"
    if fact.value is None or node.op_type not in _COMPUTING or not whole:
        return fact
    return replace(fact, value=guard_overflow(fact.value, fact.dtype))


def _fold_fact(name: str, fact: Fact) -> Fact:
    return fact if fact.value is None or fact.value.is_constant or not name else _fold_small(name, fact)


def _fold_small(name: str, fact: Fact) -> Fact:
    """Turns a small value of known numbers into a constant, so that scales and axes are found.

    Elements that differ keep their function as well: positions of a short static length stay positions, not a table.
    """
    value = fact.value
    assert value is not None
    sizes = value.sizes()
    if sizes is None or int(np.prod(sizes, dtype=np.int64)) > 16:
        return fact
    elements = value.elements()
    if elements is None:
        return fact
    numbers: list[object] = []
    for element in elements:
        if isinstance(element, Int):
            if element.constant is None:
                return fact
            numbers.append(element.constant)
        elif element.kind in ("true", "false", "const"):
            numbers.append(element.args[0] if element.kind == "const" else element.kind == "true")
        else:
            return fact
    dtype = helper.tensor_dtype_to_np_dtype(fact.dtype)
    array = np.array(numbers, dtype=np.float64 if kind_of(np.dtype(dtype)) == "f" else dtype).reshape(sizes)
    with np.errstate(over="ignore"):  # what is too large for the type is infinite in the graph, too
        constant = array.astype(dtype)
    if array.size and bool(np.all(array == array.reshape(-1)[0])):
        return Fact(fact.dtype, fact.shape, constant_tensor(name, constant))
    return Fact(fact.dtype, fact.shape, replace(value, source=constant))
