# SPDX-License-Identifier: Apache-2.0
"""Checks what is in wheels, and prints a table: ``contents.py WHEEL[=HOW IT RAN]..``. Ends with 1 where one has a fault.

The tag of a wheel has to be what its libraries really are: format, processor, and the oldest system that they run on. They
export what c_api.h declares and nothing else, and need no library that a user's machine may lack.
"""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from binary import Binary, read_binary

ROOT = Path(__file__).resolve().parents[2]
MOST_MIB = 12
# Sources and leftovers of compilers.
STRAY = tuple(
    f"*.{ending}" for ending in ["cc", "h", "cu", "cuh", "o", "obj", "a", "lib", "pdb", "pyc", "map", "cmake", "ninja"]
)
TRT_EXPORTS = frozenset({"getCreators", "setLoggerFinder"})


@dataclass(frozen=True)
class Platform:
    """What wheels for one platform look like. Patterns are those of fnmatch."""

    tag: str
    binary: str  # Binary.platform
    libraries: tuple[str, ...]  # patterns, each of which one file or more match
    needed: tuple[str, ...]  # patterns of libraries that every machine of the tag has
    least_system: tuple[int, ...]  # the newest glibc or macOS that may be asked for

    def expected_name(self, file: str) -> str:
        """The name that a library gives itself."""
        return f"@rpath/{file}" if self.binary.startswith("macos") else file


_LINUX = ("libstof_ort.so", "libstof_trt.so", "libstof_trt_autoreg[0-9]*.so")
_GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-*.so.*")
PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "linux-x86_64", _LINUX, _GLIBC, (2, 28)),
    Platform("manylinux_2_28_aarch64", "linux-aarch64", _LINUX, _GLIBC, (2, 28)),
    Platform("macosx_11_0_arm64", "macos-arm64", ("libstof_ort.dylib",), ("/usr/lib/libSystem.B.dylib",), (11, 0)),
    Platform("win_amd64", "windows-x86_64", ("stof_ort.dll",), ("kernel32.dll", "ntdll.dll", "api-ms-win-crt-*.dll"), ()),
)  # fmt: skip


def declared_exports() -> frozenset[str]:
    """The functions of c_api.h, and the one that ONNX Runtime looks for."""
    header = (ROOT / "plugins/core/c_api/c_api.h").read_text()
    return frozenset(re.findall(r"^STOF_EXPORT [^;(]*?(stof_\w+)\(", header, re.MULTILINE)) | {"RegisterCustomOps"}


def library_faults(file: str, binary: Binary, platform: Platform) -> Iterator[str]:
    """What is wrong with one library of a wheel for ``platform``."""
    if binary.platform != platform.binary:
        yield f"{file} is for {binary.platform}, the tag says {platform.binary}"
        return
    if binary.name != platform.expected_name(file):
        yield f"{file} calls itself {binary.name!r}, expected {platform.expected_name(file)!r}"
    strange = [name for name in binary.needed if not any(fnmatch(name.lower(), p.lower()) for p in platform.needed)]
    if strange:
        yield f"{file} needs {', '.join(strange)}, which machines of the tag may lack"
    if binary.least_system > platform.least_system:
        yield f"{file} needs version {binary.least_system} of the system, the tag says {platform.least_system}"
    if "autoreg" in file:
        expected: frozenset[str] = frozenset()
    else:
        expected = TRT_EXPORTS if "trt" in file else declared_exports()
    if missing := expected - binary.exports:
        yield f"{file} does not export {', '.join(sorted(missing))}"
    if extra := binary.exports - expected:
        yield f"{file} exports {len(extra)} symbols more than expected, for instance {min(extra)}"
    if binary.search_paths:
        yield f"{file} looks for libraries in {binary.search_paths}"
    if binary.has_debug_sections:
        yield f"{file} has sections for debuggers: strip it"
    if binary.signature_fault:
        yield f"the signature of {file} is wrong, and Apple silicon runs nothing without: {binary.signature_fault}"


def wheel_faults(path: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    platform = platform_of(path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if path.stat().st_size > MOST_MIB << 20:
        yield f"{path.stat().st_size / 2**20:.1f} MiB, expected at most {MOST_MIB}"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for name in ("stof/py.typed", "stof/__init__.py", "stof/lib/left_out.json"):
            if name not in names:
                yield f"{name} is missing"
        stray = [n for n in names if "__pycache__" in n or any(fnmatch(n, pattern) for pattern in STRAY)]
        if stray:
            yield f"{len(stray)} files are sources or leftovers of the build, for instance {stray[0]}"
        if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
            yield "the license is missing"
        inner = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = message_from_bytes(archive.read(inner)).get_all("Tag")
        if tags != [f"py3-none-{platform.tag}"]:
            yield f"{inner} has the tags {tags}, expected py3-none-{platform.tag}"
        metadata = message_from_bytes(archive.read(inner.replace("/WHEEL", "/METADATA")))
        if metadata["Version"] != version:
            yield f"the version is {metadata['Version']}, pyproject.toml has {version}"
        files = [n.rpartition("/")[2] for n in names if n.startswith("stof/lib/") and not n.endswith("left_out.json")]
        for pattern in platform.libraries:
            if not any(fnmatch(file, pattern) for file in files):
                yield f"no {pattern} in stof/lib"
        for file in files:
            if not any(fnmatch(file, pattern) for pattern in platform.libraries):
                yield f"stof/lib/{file} does not belong there"
                continue
            data = archive.read(f"stof/lib/{file}")
            if str(ROOT).encode() in data:
                yield f"{file} names the folder that it was built in"
            try:
                binary = read_binary(data)
            except ValueError as error:
                yield f"{file}: {error}"
            else:
                yield from library_faults(file, binary, platform)


def platform_of(path: Path) -> Platform:
    """The platform that the name of a wheel states.

    Raises:
        ValueError: the name states none of those that stof has wheels for.
    """
    tag = path.stem.split("-")[-1]
    for platform in PLATFORMS:
        if platform.tag == tag:
            return platform
    raise ValueError(f"{path.name} has the platform tag {tag}, expected one of {[p.tag for p in PLATFORMS]}")


def main() -> int:
    """Prints a row for each wheel, then its faults."""
    faulty = 0
    for argument in sys.argv[1:]:
        name, _, ran = argument.partition("=")
        path = Path(name)
        faults = list(wheel_faults(path))
        faulty += bool(faults)
        state = f"{len(faults)} faults" if faults else "contents right"
        print(f"{path.name:54} {path.stat().st_size / 2**20:5.1f} MiB  {state:14}  {ran}")
        for fault in faults:
            print(f"  {fault}")
    return min(faulty, 1)


if __name__ == "__main__":
    sys.exit(main())
