# SPDX-License-Identifier: Apache-2.0
"""Dependencies of the sources: imports and includes point one way, folders are small, and a type's name exists once."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from stof.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 25  # in a folder of sources
MOST_LINES = 500  # in a file without a reason in its first lines

Edges = Mapping[str, Mapping[str, list[str]]]  # from a package or folder to another, with the lines that lead there


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def python_room(module: str) -> str:
    """A package below ``stof``, or a module that lies there itself."""
    return module.split(".")[1] if "." in module else module


def python_edges() -> Edges:
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in tracked("optimizer/stof/*.py"):
        module = ".".join(path.with_suffix("").parts[1:])
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("stof"):
                continue
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                is_module = (ROOT / "optimizer" / Path(*inner.split("."))).with_suffix(".py").is_file()
                target = python_room(inner if is_module or node.module == "stof" else str(node.module))
                if target != python_room(module):
                    edges[python_room(module)][target].append(f"{path}:{node.lineno} imports {inner}")
    return edges


def native_room(path: Path) -> str:
    """The folder below cuda/, cpu/, plugins/ and plugins/core/; files that lie there itself stand for themselves."""
    deep = 3 if path.parts[:2] == ("plugins", "core") else 2
    return "/".join(path.parts[:deep]) if len(path.parts) > deep else str(path.with_suffix(""))


def native_edges() -> Edges:
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in tracked("cuda", "cpu", "plugins"):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        for number, line in enumerate((ROOT / path).read_text().split("\n"), 1):
            found = re.match(r'#include "((?:cuda|cpu|plugins)/[^"]+)"', line)
            if found and native_room(Path(found[1])) != native_room(path):
                edges[native_room(path)][native_room(Path(found[1]))].append(f"{path}:{number} includes {found[1]}")
    return edges


def circle(edges: Edges) -> str:
    """The lines that make a circle of packages or folders; empty where there is none."""
    try:
        list(TopologicalSorter({room: set(others) for room, others in edges.items()}).static_order())
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        steps = list(pairwise(cycle))
        return "\n".join(line for a, b in steps for line in (edges[a][b] if b in edges.get(a, {}) else edges[b][a]))
    return ""


@pytest.mark.parametrize("edges", [python_edges, native_edges])
def test_rooms_depend_on_each_other_in_one_direction(edges: object) -> None:
    found = edges()  # type: ignore[operator]
    assert found
    assert not circle(found), f"packages or folders depend on each other in a circle:\n{circle(found)}"


def test_a_circle_is_seen() -> None:
    lines = circle({"a": {"b": ["a to b"]}, "b": {"c": ["b to c"]}, "c": {"a": ["c to a"]}})
    assert sorted(lines.split("\n")) == ["a to b", "b to c", "c to a"]
    assert not circle({"a": {"b": ["a to b"], "c": ["a to c"]}, "b": {"c": ["b to c"]}})


def section(title: str) -> str:
    """A section of the page of the architecture, without its title."""
    page = (ROOT / "docs/design/architecture.md").read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"the page has no section {title!r}"
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    """The cells of a section's tables, without the lines of titles."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.split("\n") if line.startswith("|")
    ]
    dividers = [i for i, row in enumerate(rows) if set("".join(row)) <= set("-|")]
    return [row for i, row in enumerate(rows) if i not in dividers and i + 1 not in dividers]


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def order_of_imports(text: str) -> dict[str, set[str]]:
    """By package or folder, those that stand left of it in a line, or left of one of these."""
    lines = re.search(r"```\n(.*?)```", text, re.DOTALL)
    assert lines, "the page has no order of imports"
    left: dict[str, set[str]] = defaultdict(set)
    for line in lines[1].split("\n"):
        groups = [group.split(", ") for group in line.split("  <  ") if group]
        for i, group in enumerate(groups):
            for room in group:
                left[room].update(*groups[:i])
    known: dict[str, set[str]] = {}
    for room in TopologicalSorter(left).static_order():  # CycleError: lines contradict each other
        known[room] = left[room].union(*(known[other] for other in left[room]))
    return known


def against_the_order(edges: Edges, order: Mapping[str, set[str]]) -> list[str]:
    return [
        lines[0]
        for room, others in edges.items()
        for other, lines in others.items()
        if other not in order.get(room, set())
    ]


def python_packages() -> set[str]:
    paths = tracked("optimizer/stof/*.py")
    return {python_room(".".join(p.with_suffix("").parts[2:])) if len(p.parts) == 3 else p.parts[2] for p in paths}


def native_folders() -> set[str]:
    return {native_room(p) for p in tracked("cuda", "cpu", "plugins") if p.suffix in (".h", ".cc", ".cu", ".cuh")}


@pytest.mark.parametrize(("edges", "names"), [(python_edges, python_packages), (native_edges, native_folders)])
def test_the_order_of_imports_is_that_of_the_page(edges: object, names: object) -> None:
    """The page had missed new packages: each package is in a line, and imports what stands left of it."""
    order = order_of_imports(section("Imports point one way"))
    found = names()  # type: ignore[operator]
    assert len(found) > 20
    assert found - set(order) == set(), "packages and folders without a place in the order of imports"
    wrong = against_the_order(edges(), order)  # type: ignore[operator]
    assert not wrong, "imports that do not follow from the page:\n" + "\n".join(wrong)


def test_every_name_in_the_order_exists() -> None:
    assert set(order_of_imports(section("Imports point one way"))) - python_packages() - native_folders() == set()


def test_the_page_describes_every_folder() -> None:
    """Packages, modules and folders have a row. A row that ends with a slash names those inside: `cpu/` has `chain`."""
    named = set()
    for row in table_rows(section("Folders")):
        first, *others = in_code(row[0])
        inside = [first + name for name in in_code(row[1]) if first.endswith("/")]
        named |= {name.removeprefix("optimizer/stof/") for name in (first, *others, *inside)}
    packages = {room for room in python_packages() if (ROOT / "optimizer/stof" / room).is_dir()}
    modules = {f"{room}.py" for room in python_packages() - packages - {"__init__", "__main__"}}
    folders = {room for room in native_folders() if (ROOT / room).is_dir()}
    assert (packages | modules | folders) - named == set(), "packages and folders without a row"
    assert {name for name in named if name.endswith(".py")} - modules == set(), "rows of modules that are gone"


def test_the_page_lists_the_ops() -> None:
    """In the order of ``OPS``, with the operators that each writes; together they are those of the library."""
    rows = [(in_code(row[0]), in_code(row[1])) for row in table_rows(section("Operators"))]
    assert [key for (key,), _ in rows] == [op.key for op in OPS]
    assert [set(names) for _, names in rows] == [set(op.op_types) for op in OPS]
    sources = "".join((ROOT / path).read_text() for path in tracked("plugins/core/ops/*.cc"))
    assert sorted(name for _, names in rows for name in names) == sorted(re.findall(r'\.name = "(Stof\w+)"', sources))


def test_what_the_page_lacks_is_seen() -> None:
    order = order_of_imports("```\na  <  b, c\nb  <  d\n```")
    assert order == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a", "b"}}
    edges = {"d": {"a": ["d to a"], "c": ["d to c"]}, "b": {"c": ["b to c"]}, "e": {"a": ["e to a"]}}
    assert against_the_order(edges, order) == ["d to c", "b to c", "e to a"]
    with pytest.raises(CycleError):
        order_of_imports("```\na  <  b\nb  <  a\n```")
    assert table_rows("| x | y |\n|---|---|\n| `a` | b |\n") == [["`a`", "b"]]


def test_folders_are_small() -> None:
    files = tracked("optimizer", "cuda", "cpu", "plugins", "tests", "models/*.py", "tools")
    counts: dict[str, int] = defaultdict(int)
    for path in files:
        counts[str(path.parent)] += 1
    assert not {folder: n for folder, n in counts.items() if n > MOST_FILES}


def class_names(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Where each class at module level stands; names that begin with an underscore are a file's own."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path}:{node.lineno}")
    return found


def test_a_class_name_exists_once() -> None:
    found = class_names(tracked("optimizer/stof/*.py"))
    assert not {name: places for name, places in found.items() if len(places) > 1}


# At namespace scope: not indented, and no forward declaration. Namespaces without a name are a source's own; those of
# headers, as of the CPU's kernels, are not.
_TYPE = re.compile(
    r"^(?:template <[^>]*>\s*)?(?:class|struct|enum class|enum) (?:alignas\([^)]*\) )?(\w+)(?: final)?[ :{][^;]*$"
)
# The vector of each instruction set, in the set's namespace.
_SEVERAL = {"Simd"}


def native_types(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Where each type at namespace scope stands, outside of unnamed namespaces of sources."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        unnamed = False
        for number, line in enumerate((ROOT / path).read_text().split("\n"), 1):
            if line.startswith("namespace {") and path.suffix in (".cc", ".cu"):
                unnamed = True
            elif line.startswith("}  // namespace") and unnamed:
                unnamed = False
            match = _TYPE.match(line)
            if match and not unnamed and match[1] not in _SEVERAL and "::" not in line:
                found[match[1]].append(f"{path}:{number}")
    return found


def test_a_native_type_name_exists_once() -> None:
    sources = [p for p in tracked("cuda", "cpu", "plugins") if p.suffix in (".h", ".cc", ".cu", ".cuh")]
    found = native_types(sources)
    assert len(found) > 100
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_long_files_say_why() -> None:
    sources = tracked("optimizer/*.py", "cuda", "cpu", "plugins", "tests/*.py", "tests/*.cc", "tests/*.h", "tools")
    unexplained = {}
    for path in sources:
        lines = (ROOT / path).read_text().split("\n")
        if len(lines) > MOST_LINES + 1 and "500 lines" not in " ".join(lines[:40]):
            unexplained[str(path)] = len(lines) - 1
    assert not unexplained
