# SPDX-License-Identifier: Apache-2.0
"""Functions are short: 60 lines in Python, 80 in C++ and CUDA, or their docstring or comment says why they are longer."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_PYTHON, MOST_NATIVE = 60, 80
NATIVE = (".h", ".cc", ".cu", ".cuh")
# What a test must not lose sight of by a change of the reader below.
LEAST_PYTHON, LEAST_NATIVE = 3000, 1000

# Comments, literals, and preprocessor lines with those that continue them.
_HIDDEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"([^(\s]*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"
    r"|^[ \t]*#(?:[^\n\\]|\\\n|\\.)*",
    re.DOTALL | re.MULTILINE,
)
_TOKEN = re.compile(r"[{}();]")
_SCOPE = re.compile(r"^(?:(?:typedef|static|inline|extern|export)\s+)*(?:namespace|struct|class|union|enum|extern)\b")
_ATTRIBUTE = re.compile(r"\b__\w+__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\balignas\s*\([^()]*\)")
_TEMPLATE = re.compile(r"\btemplate\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>")
_LABEL = re.compile(r"^(?:\s*(?:public|protected|private)\s*:(?!:))+")


@dataclass(frozen=True)
class Function:
    """A function of the sources.

    Attributes:
        name: for messages.
        path: of its file.
        first: its first line, from 1; a template's head is part of it.
        last: the line of its end.
        introduction: its docstring; in C++ the comments right before it and at the start of its body.
    """

    name: str
    path: Path
    first: int
    last: int
    introduction: str

    def fault(self, most: int) -> str:
        """What is wrong with its size; empty where nothing is."""
        lines = self.last - self.first + 1
        reason = re.search(rf"Longer than {most} lines: \S+", self.introduction)
        if lines <= most or reason:
            return ""
        return (
            f'{self.path}:{self.first} {self.name} has {lines} lines: split it, or say "Longer than {most} lines: ..."'
        )


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def python_functions(path: Path, text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Function(node.name, path, node.lineno, node.end_lineno, ast.get_docstring(node) or "")


def native_functions(path: Path, text: str) -> list[Function]:
    """The functions of a C++ or CUDA source, those of classes among them; lambdas are part of the function around them."""
    hidden = _HIDDEN.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    functions: list[Function] = []
    scopes: list[bool] = []  # of each open brace: whether functions may begin in it
    start = body = parentheses = 0  # begin of the current declaration, and of its body
    for match in _TOKEN.finditer(hidden):
        at, token = match.start(), match[0]
        is_outside = all(scopes)
        if token in "()" and is_outside:
            parentheses += 1 if token == "(" else -1
        elif token == ";" and is_outside and not parentheses:
            start = at + 1
        elif token == "{":
            head = _LABEL.sub("", hidden[start:at])
            is_scope = is_outside and not parentheses and _is_scope(head)
            if is_outside:
                body = at
            scopes.append(is_scope)
            start = at + 1 if is_scope else start
        elif token == "}":
            assert scopes, f"{path}: a brace too many at line {hidden.count(chr(10), 0, at) + 1}"
            is_scope = scopes.pop()
            if is_scope or (all(scopes) and not parentheses and not _goes_on(hidden, at + 1)):
                if not is_scope and "(" in hidden[start:body]:
                    functions.append(_function(path, text, hidden, (start, body, at)))
                start = at + 1
    assert not scopes, f"{path}: a brace too few"
    return functions


def _is_scope(head: str) -> bool:
    """Whether a declaration with a brace behind it is a namespace, a class or an ``extern "C"``."""
    without_template = _TEMPLATE.sub("", head)
    return bool(_SCOPE.match(without_template.strip())) and not re.search(
        r"\)\s*(?:const|noexcept|override)?\s*$", head
    )


def _goes_on(hidden: str, at: int) -> bool:
    """Whether a declaration goes on behind a brace: that of an initializer of a constructor or a variable."""
    return re.match(r"\s*[,{;=.)]", hidden[at:]) is not None


def _function(path: Path, text: str, hidden: str, span: tuple[int, int, int]) -> Function:
    start, body, end = span
    head = _LABEL.sub(lambda m: " " * len(m[0]), hidden[start:body])
    begin = start + len(head) - len(head.lstrip())
    name = re.search(r"(operator\s*[^\s\w]+|[~\w:<>]*[\w>])\s*\(", _ATTRIBUTE.sub("", _TEMPLATE.sub("", head)))
    lines = text.split("\n")
    first, last = text.count("\n", 0, begin), text.count("\n", 0, end)
    before = first
    while before and lines[before - 1].lstrip().startswith("//"):
        before -= 1
    inside = text.count("\n", 0, body) + 1
    behind = inside
    while behind < len(lines) and lines[behind].lstrip().startswith("//"):
        behind += 1
    comment = [line.strip().lstrip("/").strip() for line in (*lines[before:first], *lines[inside:behind])]
    return Function(name[1] if name else "a function", path, first + 1, last + 1, " ".join(comment))


def test_python_functions() -> None:
    paths = tracked("optimizer/stof/*.py")
    functions = [f for path in paths for f in python_functions(path, (ROOT / path).read_text())]
    assert len(functions) >= LEAST_PYTHON
    assert not [fault for f in functions if (fault := f.fault(MOST_PYTHON))]


def test_native_functions() -> None:
    paths = [path for path in tracked("cpu", "cuda", "plugins") if path.suffix in NATIVE]
    functions = [f for path in paths for f in native_functions(path, (ROOT / path).read_text())]
    assert len(functions) >= LEAST_NATIVE
    assert not [fault for f in functions if (fault := f.fault(MOST_NATIVE))]


NATIVE_SOURCE = """\
#define STOF_BODY(x) {  // no function
namespace stof {
namespace {
constexpr int kSizes[] = {1, 2};
struct Point {
  int x = 0, y{};
  // Comes before.
  bool operator==(const Point& other) const { return x == other.x; }
 private:
  void Move(int by) {
    const auto step = [&] { x += by; };
    for (int i = 0; i < 2; ++i) { step(); }
  }
};
}  // namespace

template <typename T, typename = std::enable_if_t<sizeof(T) == 2>>
__global__ void __launch_bounds__(Max(128, 2), 1)
    Kernel(const T* data, Point at = {}) {
  // Stands inside.
  const char* text = "}";  /* { */
  const char brace = '{';
}

Point::Point(int x) : x_{x}, y_(2) {}

extern "C" int stof_run(void) { return 1'000; }
}  // namespace stof
"""


def test_reader_of_native_functions() -> None:
    functions = native_functions(Path("a.cc"), NATIVE_SOURCE)
    assert [(f.name, f.first, f.last, f.introduction) for f in functions] == [
        ("operator==", 8, 8, "Comes before."),
        ("Move", 10, 13, ""),
        ("Kernel", 17, 23, "Stands inside."),
        ("Point::Point", 25, 25, ""),
        ("stof_run", 27, 27, ""),
    ]


@pytest.mark.parametrize(
    ("lines", "introduction", "is_fault"),
    [
        (80, "", False),
        (81, "", True),
        (81, "Longer than 80 lines: a table.", False),
        (81, "Longer than 80 lines:", True),
    ],
)
def test_fault(lines: int, introduction: str, is_fault: bool) -> None:
    fault = Function("Run", Path("a.cc"), 1, lines, introduction).fault(80)
    assert bool(fault) == is_fault
