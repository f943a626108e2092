# SPDX-License-Identifier: Apache-2.0
"""Parses descriptions of fused chains (docs/reference/chain-format.md), independently of the library's parser.

``ChainDescription.parse`` is the way in; printer.py writes descriptions.
"""

from __future__ import annotations

import math
import re

from stof.errors import ModelError
from stof.fusion.description.format import (
    ARITY,
    KEYWORDS,
    LARGEST_INTEGER,
    MOST_AXES,
    MOST_DEPTH,
    MOST_INPUTS,
    MOST_OUTPUTS,
    MOST_TEXT,
)
from stof.fusion.description.nodes import (
    AffineIndex,
    Axes,
    AxisSize,
    ChainOutput,
    ExpressionNode,
    Lets,
    negate,
    number_node,
)

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]*\.?[0-9a-fA-F]*(?:[pP][+-]?\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>//|<=|>=|==|!=|[-+*/%<>=()\[\],]))",
    re.ASCII,
)
_INPUT, _OUTPUT = re.compile(r"x\d+"), re.compile(r"y\d+")


def parse_parts(text: str) -> tuple[Axes, Lets, tuple[ChainOutput, ...]]:
    """The axes, named values and outputs of a description.

    Raises:
        ModelError: with the line, what was found and what was expected.
    """
    if len(text.encode()) > MOST_TEXT:
        raise ModelError(f"a description of {len(text)} bytes, expected at most {MOST_TEXT}")
    axes: Axes = ()
    lets: list[tuple[str, ExpressionNode]] = []
    outs: list[ChainOutput] = []
    for number, line in enumerate(re.split(r"[;\n]", text), 1):
        if not line.strip():
            continue
        reader = _Line(line, number, [a for a, _ in axes], [n for n, _ in lets])
        word = reader.name()
        if (word == "axes") == bool(axes):
            raise reader.error("'axes' on the first line, and only there", word)
        if word == "axes":
            axes = reader.axes()
        elif word == "let":
            lets.append(reader.let())
        elif word == "out":
            outs.append(reader.out(len(outs)))
        else:
            raise reader.error("'axes', 'let' or 'out'", word)
        reader.end()
    if not axes or not 1 <= len(outs) <= MOST_OUTPUTS:
        raise ModelError(f"a description with {len(axes)} axes and {len(outs)} outputs, expected both")
    return axes, tuple(lets), tuple(outs)


class _Line:
    """A recursive-descent parser of one line."""

    def __init__(self, text: str, number: int, axes: list[str], lets: list[str]) -> None:
        self.number = number
        self.known_axes = axes
        self.lets = lets
        self.tokens: list[tuple[str, str]] = []
        self.depth = 0
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise ModelError(
                    f"line {number} of a chain: {text[position : position + 20]!r} is no part of the format"
                )
            self.tokens.append((match.lastgroup, match.group(match.lastgroup)))
            position = match.end()
        self.position = 0

    def error(self, expected: str, seen: str | None = None) -> ModelError:
        shown = self.peek() if seen is None else seen
        return ModelError(f"line {self.number} of a chain: found {shown or 'its end'!r}, expected {expected}")

    def peek(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def take(self, *words: str) -> str:
        """Takes the next token where it is one of ``words``; else returns an empty text."""
        token = self.peek()
        if token and token in words:
            self.position += 1
            return token
        return ""

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.error(repr(word))

    def _next(self, kind: str, expected: str) -> str:
        if self.position >= len(self.tokens) or self.tokens[self.position][0] != kind:
            raise self.error(expected)
        self.position += 1
        return self.tokens[self.position - 1][1]

    def name(self) -> str:
        return self._next("name", "a name")

    def integer(self) -> int:
        text = self._next("number", "an integer")
        digits = text.lstrip("0") or "0"  # int() refuses thousands of digits with a message of its own
        if not text.isdigit() or len(digits) > 10 or int(digits) > LARGEST_INTEGER:
            raise self.error("an integer of at most 2^31", text[:24])
        return int(digits)

    def end(self) -> None:
        if self.position < len(self.tokens):
            raise self.error("the end of the line")

    def axes(self) -> tuple[tuple[str, AxisSize], ...]:
        axes: list[tuple[str, AxisSize]] = []
        while not axes or self.take(","):
            name = self.name()
            self.expect("=")
            if name in dict(axes) or _is_reserved(name):
                raise self.error("a new name for an axis", name)
            axes.append((name, self._size()))
        if len(axes) > MOST_AXES:
            raise self.error(f"at most {MOST_AXES} axes", str(len(axes)))
        return tuple(axes)

    def _size(self) -> AxisSize:
        kind, text = self.tokens[self.position] if self.position < len(self.tokens) else ("", "")
        if kind == "number":
            return AxisSize(self.integer())
        if not _INPUT.fullmatch(text):
            raise self.error("an integer or a dimension of an input")
        self.position += 1
        # A dimension is written as the fraction of a number: ".1".
        dim = self._next("number", "the number of a dimension")
        if not re.fullmatch(r"\.\d", dim):
            raise self.error("the number of a dimension", dim)
        by = self.integer() if self.take("/") else 1
        if by < 1:
            raise self.error("a divisor of at least 1", str(by))
        return AxisSize(by, _input_number(text), int(dim[1:]))

    def let(self) -> tuple[str, ExpressionNode]:
        name = self.name()
        if name in self.lets or name in self.known_axes or _is_reserved(name):
            raise self.error("a new name", name)
        self.expect("=")
        return name, self.expression()

    def out(self, position: int) -> ChainOutput:
        if self.name() != f"y{position}":
            raise self.error(f"'y{position}'")
        dtype = self.name()
        if dtype not in ("f32", "f16", "bf16"):
            raise self.error("a type: f32, f16 or bf16", dtype)
        self.expect("[")
        dims: list[tuple[str, ...]] = []
        while not dims or self.take(","):
            if self.take("("):
                names = [self.name()]
                while not self.take(")"):
                    names.append(self.name())
                dims.append(tuple(names))
            else:
                dims.append(() if self.take("1") else (self.name(),))
        self.expect("]")
        self.expect("=")
        used = [a for d in dims for a in d]
        missing = set(self.known_axes) - set(used)
        if len(set(used)) < len(used) or not set(used) <= set(self.known_axes) or missing - {self.known_axes[-1]}:
            raise self.error("every axis once, of which the last may be left out", " ".join(used))
        return ChainOutput(dtype, tuple(dims), self.expression())

    def expression(self) -> ExpressionNode:
        self._descend()
        expression = self._sum()
        if op := self.take("<", "<=", ">", ">=", "==", "!="):
            expression = ExpressionNode(op, (expression, self._sum()))
        self.depth -= 1
        return expression

    def _sum(self) -> ExpressionNode:
        left = self._product()
        while op := self.take("+", "-"):
            left = ExpressionNode(op, (left, self._product()))
        return left

    def _product(self) -> ExpressionNode:
        left = self._unary()
        while op := self.take("*", "/"):
            left = ExpressionNode(op, (left, self._unary()))
        return left

    def _unary(self) -> ExpressionNode:
        if not self.take("-"):
            return self._atom()
        self._descend()
        inner = self._unary()
        self.depth -= 1
        return negate(inner)

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.error(f"at most {MOST_DEPTH} levels")

    def _number(self, text: str) -> float:
        is_hexadecimal = text[:2] in ("0x", "0X")
        mantissa = re.split(
            "[pP]" if is_hexadecimal else "[eE]", text.removeprefix(text[:2] if is_hexadecimal else "")
        )[0]
        try:
            number = float.fromhex(text) if is_hexadecimal else float(text)
        except (ValueError, OverflowError):
            number = math.inf
        if math.isinf(number) or (number == 0 and mantissa.strip("0.")):  # too large, or too small
            raise self.error("a floating-point number", text)
        return number

    def _atom(self) -> ExpressionNode:
        if self.take("("):
            inner = self.expression()
            self.expect(")")
            return inner
        kind, text = self.tokens[self.position] if self.position < len(self.tokens) else ("", "")
        self.position += 1
        if kind == "number":
            return number_node(self._number(text))
        if text in ("inf", "nan"):
            return number_node(float(text))
        if text in ARITY:
            self.expect("(")
            arguments = [self.expression()]
            while self.take(","):
                arguments.append(self.expression())
            self.expect(")")
            if len(arguments) != ARITY[text]:
                raise self.error(f"{ARITY[text]} arguments of {text}", str(len(arguments)))
            return ExpressionNode(text, tuple(arguments))
        if text in self.known_axes:
            return ExpressionNode("axis", value=text)
        if text in self.lets:
            return ExpressionNode("let", value=text)
        if _INPUT.fullmatch(text):
            self.expect("[")
            indices: list[AffineIndex] = []
            if not self.take("]"):
                indices.append(self._index())
                while self.take(","):
                    indices.append(self._index())
                self.expect("]")
            return ExpressionNode("read", value=float(_input_number(text)), indices=tuple(indices))
        self.position -= 1
        raise self.error("a number, an axis, a name, a read, a function or '('")

    def _index(self) -> AffineIndex:
        if self.take("("):
            inner = self._affine()
            self.expect(")")
            op = self.take("//", "%")
            if not op:
                raise self.error("'//' or '%'")
            by = self.integer()
            if by < 1:
                raise self.error("a divisor of at least 1", str(by))
            return AffineIndex(inner.terms, inner.constant, op, by)
        return self._affine()

    def _affine(self) -> AffineIndex:
        sums: dict[str, int] = {}
        sign = self.take("-")
        while True:
            factor, axis = -1 if sign == "-" else 1, ""
            is_number = self.position < len(self.tokens) and self.tokens[self.position][0] == "number"
            if is_number:
                factor *= self.integer()
            if not is_number or self.take("*"):
                axis = self.name()
                if axis not in self.known_axes:
                    raise self.error("an axis", axis)
            sums[axis] = sums.get(axis, 0) + factor
            if abs(sums[axis]) > LARGEST_INTEGER:
                raise self.error("an index whose terms add up to at most 2^31", str(sums[axis]))
            sign = self.take("+", "-")
            if not sign:
                constant = sums.pop("", 0)
                return AffineIndex(tuple(sums.items()), constant)


def _is_reserved(name: str) -> bool:
    """Whether the format has this word itself."""
    return name in ARITY or name in KEYWORDS or bool(_INPUT.fullmatch(name) or _OUTPUT.fullmatch(name))


def _input_number(text: str) -> int:
    number = int(text[1:])
    if number >= MOST_INPUTS:
        raise ModelError(f"a chain reads {text}, expected at most {MOST_INPUTS} inputs")
    return number
