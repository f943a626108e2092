# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/guide/languages.md in C and C++ compile as they are printed, and load a model that needs the library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from guide_pages import read_blocks
from tests.examples.test_examples import EXAMPLES, ROOT, known_headers, run

import stof

PAGE = ROOT / "docs/guide/languages.md"
PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(page LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 17)
list(APPEND CMAKE_MODULE_PATH {root}/cmake)
include(OnnxRuntimeHeaders)
foreach(source page.c page.cpp)
  string(REPLACE . _ name ${{source}})
  add_executable(${{name}} ${{source}})
  target_include_directories(${{name}} SYSTEM PRIVATE ${{STOF_ORT_INCLUDE_DIR}})
  target_link_libraries(${{name}} PRIVATE {library})
  target_compile_options(${{name}} PRIVATE -Wall -Wextra)
endforeach()
"""
# What a program does behind the block: it prints the number of the session's inputs.
ENDS = {
    "c": "size_t count = 0; if (!status) status = ort->SessionGetInputCount(session, &count);\n"
    'if (status) fprintf(stderr, "%s\\n", ort->GetErrorMessage(status));\n'
    'printf("%zu inputs\\n", count); return status != NULL;',
    "cpp": 'std::printf("%zu inputs\\n", session.GetInputCount());',
}
HEADERS = {"c": "#include <stdio.h>", "cpp": "#include <cstdio>"}


def program(language: str) -> str:
    """The block of a language as a program: what it includes, and its statements in main."""
    (block,) = (block for block in read_blocks(PAGE) if block.language == language)
    lines = block.text.splitlines()
    includes = [line for line in lines if line.startswith("#include")]
    assert includes
    body = [line for line in lines if line not in includes]
    return "\n".join([HEADERS[language], *includes, "int main(void) {", *body, ENDS[language], "}", ""])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links libonnxruntime.so")
def test_blocks_load_a_model(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    source, build, fast = tmp_path / "source", tmp_path / "build", tmp_path / "fast"
    for folder in (source, build, fast):
        folder.mkdir()
    for language in ENDS:
        (source / f"page.{language}").write_text(program(language))
    capi = Path(run(sys.executable, "-c", "import onnxruntime as o; print(o.__file__)").strip()).parent / "capi"
    (runtime,) = capi.glob("libonnxruntime.so*")
    (build / "libonnxruntime.so.1").symlink_to(runtime)
    (source / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT, library=build / "libonnxruntime.so.1"))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", source, "-B", build, *generator, *known_headers())
    run("cmake", "--build", build)

    stof.optimize(narrow("modernbert.dynamo.sdpa"), fast / "model.onnx", stof.Options(verify=False))
    model = onnx.load(str(fast / "model.onnx"))
    del model.functions[:]  # without them a session needs the library
    onnx.save(model, str(fast / "model.onnx"))
    library = fast / "libstof_ort.so"
    shutil.copy(stof.get_library_path(), library)
    for name in ("page_c", "page_cpp"):
        done = subprocess.run([build / name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "2 inputs\n"), f"{name}: {done.stderr}"
    library.unlink()
    for name in ("page_c", "page_cpp"):
        assert subprocess.run([build / name], cwd=tmp_path, capture_output=True).returncode != 0, name


def test_calls_of_the_table_are_those_of_the_blocks() -> None:
    """Each language's call stands in its row and in its block."""
    text = PAGE.read_text()
    blocks = {block.language: block.text for block in read_blocks(PAGE)}
    calls = {
        "cpp": "options.RegisterCustomOpsLibrary(",
        "c": "RegisterCustomOpsLibrary_V2(options, ",
        "csharp": "options.RegisterCustomOpLibrary(",
        "java": "options.registerCustomOpLibrary(",
    }
    assert set(calls) | {"js"} == set(blocks)
    for language, call in calls.items():
        assert call in blocks[language]
        assert f"`{call}" in text
    assert (EXAMPLES / "node/run_model.mjs").is_file()
