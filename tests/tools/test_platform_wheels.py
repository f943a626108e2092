# SPDX-License-Identifier: Apache-2.0
"""tools/platform_wheels: libraries are read as they are, and each fault of a wheel is found.

``tools/wheels.sh`` (``make test-all``) builds the real wheels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stof import library_path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tools/platform_wheels"
sys.path.insert(0, str(FOLDER))
binary, contents, macho_signature, platforms = map(
    import_module, ("binary", "contents", "macho_signature", "platforms")
)

LINUX, _, MACOS, WINDOWS = platforms.PLATFORMS
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def good(platform: Any = LINUX, file: str = "libstof_ort.so") -> Any:
    """A library without a fault."""
    return binary.Binary(
        platform.binary, platform.expected_name(file), platform.needed[:1], contents.declared_exports(),
        platform.least_system, (), "", False,
    )  # fmt: skip


def test_exports_are_those_of_the_header() -> None:
    """The pattern that reads c_api.h misses no function: the built library exports the same."""
    built = binary.read_binary(library_path().read_bytes())
    assert built.platform in {"linux-x86_64", "linux-aarch64"}
    assert built.exports == contents.declared_exports()
    assert built.name == "libstof_ort.so"
    assert "libc.so.6" in built.needed
    assert built.least_system > (2, 0)
    assert (built.search_paths, built.has_debug_sections) == ((), False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "linux-aarch64"}, "is for linux-aarch64, the tag says linux-x86_64"),
        ({"name": "libother.so"}, "calls itself 'libother.so', expected 'libstof_ort.so'"),
        ({"needed": ("libc.so.6", "libstdc++.so.6")}, r"needs libstdc\+\+.so.6, which machines"),
        ({"least_system": (2, 29)}, r"needs version \(2, 29\) of the system"),
        ({"exports": contents.declared_exports() - {"stof_op_run"}}, "does not export stof_op_run"),
        (
            {"exports": contents.declared_exports() | {"_ZSt4cout"}},
            "exports 1 symbols more than expected, for instance _ZSt4",
        ),
        ({"search_paths": ("/home",)}, "looks for libraries in"),
        ({"has_debug_sections": True}, "strip it"),
        ({"signature_fault": "there is none"}, "the signature of libstof_ort.so is wrong"),
    ],
)
def test_faults_of_a_library(change: dict[str, Any], words: str) -> None:
    (fault,) = contents.library_faults("libstof_ort.so", dataclasses.replace(good(), **change), LINUX)
    assert re.search(words, fault)


@pytest.mark.parametrize(
    ("platform", "file"),
    [(LINUX, "libstof_ort.so"), (MACOS, "libstof_ort.dylib"), (WINDOWS, "stof_ort.dll")],
)
def test_a_library_without_faults(platform: Any, file: str) -> None:
    assert list(contents.library_faults(file, good(platform, file), platform)) == []


def test_names_of_toolchains_and_tags() -> None:
    """Each platform has a toolchain, and scripts read the tags from the list, by a Python without packages."""
    command = [sys.executable, "-S", FOLDER / "platforms.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tags = dict(line.split() for line in printed.splitlines())
    assert tags == {platform.binary: platform.tag for platform in platforms.PLATFORMS}
    files = {path.stem for path in (ROOT / "cmake/toolchains").glob("*.cmake")}
    assert files == {*tags, "zig"}
    for script in ("wheels.sh", "release_check.sh"):
        text = (ROOT / "tools" / script).read_text()
        assert "tools/platform_wheels/platforms.py" in text
        assert not any(tag in text for tag in tags.values())


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Writes a wheel of this machine's library, with members replaced; None leaves one out."""

    def make(changes: dict[str, bytes | None], tag: str = LINUX.tag) -> Path:
        info = f"stof_onnx-{VERSION}.dist-info"
        members: dict[str, bytes | None] = {
            "stof/__init__.py": b"",
            "stof/py.typed": b"",
            "stof/lib/left_out.json": b"{}",
            f"{info}/licenses/LICENSE": b"",
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n".encode(),
            f"{info}/METADATA": f"Name: stof-onnx\nVersion: {VERSION}\n".encode(),
        }
        path = tmp_path / f"stof_onnx-{VERSION}-py3-none-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            renamed = {name.replace("INFO", info): data for name, data in changes.items()}
            for name, data in {**members, **renamed}.items():
                if data is not None:
                    archive.writestr(name, data)
        return path

    return make


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no libstof_ort.so in stof/lib"),
        ({"stof/py.typed": None}, "stof/py.typed is missing"),
        ({"stof/kernel.cc": b""}, "1 files are sources or leftovers of the build, for instance stof/kernel.cc"),
        ({"stof/__pycache__/a.pyc": b""}, "leftovers"),
        ({"INFO/licenses/LICENSE": None}, "the license is missing"),
        ({"INFO/WHEEL": b"Tag: py3-none-any\n"}, r"has the tags \['py3-none-any'\]"),
        ({"INFO/METADATA": b"Version: 9.9.9\n"}, "the version is 9.9.9, pyproject.toml has"),
        ({"stof/lib/libother.so": b""}, "stof/lib/libother.so does not belong there"),
        ({"stof/lib/libstof_ort.so": b"text"}, "begins with 74657874, expected an ELF, PE or"),
        ({"stof/lib/libstof_ort.so": b'"build_id": "0123456789abcdef"'}, "was not built from this checkout"),
        ({"stof/old.py": b""}, "Python files are not those of this checkout, for instance stof/"),
        ({"stof/lib/libstof_ort.so": str(ROOT).encode()}, "names the folder that it was built in"),
    ],
)
def test_faults_of_a_wheel(changes: dict[str, bytes | None], words: str, make_wheel: Callable[..., Path]) -> None:
    found = list(contents.wheel_faults(make_wheel(changes)))
    assert any(re.search(words, fault) for fault in found), found


def test_the_build_id_is_that_of_the_build(tmp_path: Path, make_wheel: Callable[..., Path]) -> None:
    """CMake's script writes the same for the sources that CMakeLists.txt hashes, and a library that states it is right."""
    endings = {"cpu": (".h", ".cc"), "cuda": (".h", ".cuh", ".cu", ".cc"), "plugins": (".h", ".cc")}
    paths = (p for folder, some in endings.items() for p in (ROOT / folder).rglob("*") if p.suffix in some)
    names = ";".join(sorted(path.relative_to(ROOT).as_posix() for path in paths))
    header = tmp_path / "id.h"
    script = ROOT / "cmake/build_id.cmake"
    subprocess.run(["cmake", f"-DROOT={ROOT}", f"-DSOURCES={names}", f"-DOUTPUT={header}", "-P", script], check=True)
    assert header.read_text() == f'#define STOF_BUILD_ID "{contents.build_id()}"\n'
    path = make_wheel({"stof/lib/libstof_ort.so": f'"build_id": "{contents.build_id()}"'.encode()})
    assert not any("libstof_ort.so was not built" in fault for fault in contents.wheel_faults(path))


def test_a_package_of_this_checkout(make_wheel: Callable[..., Path]) -> None:
    package = ROOT / "optimizer"
    files = {p.relative_to(package).as_posix(): p.read_bytes() for p in (package / "stof").rglob("*.py")}
    assert not any("Python files" in fault for fault in contents.wheel_faults(make_wheel(files)))


def test_a_wheel_of_another_tag(make_wheel: Callable[..., Path]) -> None:
    """The library of this machine in a wheel for Windows and for no known platform."""
    path = make_wheel({"stof/lib/stof_ort.dll": library_path().read_bytes()}, WINDOWS.tag)
    assert any("the tag says windows-x86_64" in fault for fault in contents.wheel_faults(path))
    with pytest.raises(ValueError, match="has the platform tag musllinux_1_2_x86_64"):
        list(contents.wheel_faults(make_wheel({}, "musllinux_1_2_x86_64")))


def test_the_table_says_how_each_wheel_ran(make_wheel: Callable[..., Path]) -> None:
    path = make_wheel({})
    command = [sys.executable, FOLDER / "contents.py", f"{path}=built, not run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    head, *rest = done.stdout.splitlines()
    assert head.split() == [path.name, "0.0", "MiB", str(len(rest)), "faults", "built,", "not", "run"]


def test_an_unknown_tag_is_a_fault(make_wheel: Callable[..., Path]) -> None:
    """What auditwheel names a wheel of `make wheel`."""
    path = make_wheel({}, "manylinux_2_36_x86_64")
    done = subprocess.run([sys.executable, FOLDER / "contents.py", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{path.name} has the platform tag manylinux_2_36_x86_64, expected one of" in done.stdout


def signed(page: int = 12) -> tuple[bytearray, int]:
    """A file of two pages and a half, and an ad-hoc signature behind it."""
    size = (5 << page) // 2
    data = bytearray(range(256)) * (size // 256)
    hashes = b"".join(hashlib.sha256(data[i : i + (1 << page)]).digest() for i in range(0, size, 1 << page))
    fields = (0xFADE0C02, 44 + len(hashes), 0x20400, 2, 44, 0, 0, len(hashes) // 32, size, 32, 2, 0, page)
    directory = struct.pack(">IIIIIIIII4B", *fields) + bytes(4) + hashes
    blob = struct.pack(">III", 0xFADE0CC0, 20 + len(directory), 1) + struct.pack(">II", 0, 20) + directory
    return data + blob, size


def test_signatures() -> None:
    data, at = signed()
    assert macho_signature.signature_fault(bytes(data), at) == ""
    changed = bytearray(data)
    changed[at - 1] ^= 1  # in the last page, which is not full
    assert macho_signature.signature_fault(bytes(changed), at) == "page 2 of 3 is not what was signed"
    changed = bytearray(data)
    changed[at + 20 + 15] = 0  # flags
    assert "expected ad hoc and SHA-256" in macho_signature.signature_fault(bytes(changed), at)
    assert "expected 0xfade0cc0" in macho_signature.signature_fault(bytes(data), at - 4)


def test_an_unknown_platform_is_refused() -> None:
    done = subprocess.run(
        ["bash", ROOT / "tools/wheels.sh", sys.executable, "amiga"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("wheels.sh: no platform amiga; there are ")


@pytest.mark.parametrize("script", ["make_aarch64_python.sh", "run_on_aarch64.sh", "run_on_windows.sh"])
def test_scripts_are_read_by_bash(script: str) -> None:
    subprocess.run([str(shutil.which("bash")), "-n", FOLDER / script], check=True)


def test_the_emulated_tests_exist() -> None:
    names = re.findall(r"^tests/.*", (FOLDER / "aarch64_tests.txt").read_text(), re.MULTILINE)
    assert names
    assert all((ROOT / name.partition("::")[0]).is_file() for name in names)


def test_cases_need_operators_of_stof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose model has none of them would compare ONNX Runtime with itself."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    write_case = runpy.run_path(str(FOLDER / "make_cases.py"))["write_case"]
    source = tmp_path / "plain.onnx"
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Abs (x) }'
    onnx.save(onnx.parser.parse_model(text), source)
    with pytest.raises(ValueError, match=r"plain.onnx has the operators \[\] after stof, expected \['StofAttention'\]"):
        write_case(tmp_path, source, {}, [], {"StofAttention"})
