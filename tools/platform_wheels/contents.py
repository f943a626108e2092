# SPDX-License-Identifier: Apache-2.0
"""Checks what is in wheels, and prints a table: ``contents.py WHEEL[=HOW IT RAN]..``. Ends with 1 where one has a fault.

The tag of a wheel has to be what its libraries really are: format, processor, and the oldest system that they run on. They
export what c_api.h declares and nothing else, and need no library that a user's machine may lack. Libraries and Python files are
those of this checkout: a wheel that was built before the last change is a fault.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from binary import Binary, read_binary
from platforms import Platform, platform_of

ROOT = Path(__file__).resolve().parents[2]
MOST_MIB = 12
# Sources and leftovers of compilers.
STRAY = tuple(
    f"*.{ending}" for ending in ["cc", "h", "cu", "cuh", "o", "obj", "a", "lib", "pdb", "pyc", "map", "cmake", "ninja"]
)
TRT_EXPORTS = frozenset({"getCreators", "setLoggerFinder"})


def declared_exports() -> frozenset[str]:
    """The functions of c_api.h, and the one that ONNX Runtime looks for."""
    header = (ROOT / "plugins/core/c_api/c_api.h").read_text()
    return frozenset(re.findall(r"^STOF_EXPORT [^;(]*?(stof_\w+)\(", header, re.MULTILINE)) | {"RegisterCustomOps"}


def build_id() -> str:
    """The build id of a library that is built from this checkout, as cmake/build_id.cmake computes it."""
    found = re.search(
        r"GLOB_RECURSE STOF_HASHED .*\$\{PROJECT_SOURCE_DIR\} (.*)\)", (ROOT / "CMakeLists.txt").read_text()
    )
    if found is None:
        raise ValueError("CMakeLists.txt sets no STOF_HASHED, which names the sources of the build id")
    paths = {
        path for folder, ending in (p.split("/") for p in found[1].split()) for path in (ROOT / folder).rglob(ending)
    }
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    lines = (f"{name} {hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def python_faults(archive: zipfile.ZipFile) -> Iterator[str]:
    """Python files of a wheel that are not those of this checkout."""
    packed = {name: archive.read(name) for name in archive.namelist() if fnmatch(name, "stof/*.py")}
    package = ROOT / "optimizer"
    own = {path.relative_to(package).as_posix(): path.read_bytes() for path in (package / "stof").rglob("*.py")}
    if other := sorted(name for name in packed.keys() | own.keys() if packed.get(name) != own.get(name)):
        yield f"{len(other)} Python files are not those of this checkout, for instance {other[0]}: build the wheel again"


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
        yield from python_faults(archive)
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
            if "autoreg" not in file and f'"build_id": "{build_id()}"'.encode() not in data:
                yield f"{file} was not built from this checkout, whose build id is {build_id()}: build the wheel again"
            try:
                binary = read_binary(data)
            except ValueError as error:
                yield f"{file}: {error}"
            else:
                yield from library_faults(file, binary, platform)


def main() -> int:
    """Prints a row for each wheel, then its faults."""
    faulty = 0
    for argument in sys.argv[1:]:
        name, _, ran = argument.partition("=")
        path = Path(name)
        try:
            faults = list(wheel_faults(path))
        except ValueError as error:
            faults = [str(error)]
        faulty += bool(faults)
        state = f"{len(faults)} faults" if faults else "contents right"
        print(f"{path.name:54} {path.stat().st_size / 2**20:5.1f} MiB  {state:14}  {ran}")
        for fault in faults:
            print(f"  {fault}")
    return min(faulty, 1)


if __name__ == "__main__":
    sys.exit(main())
