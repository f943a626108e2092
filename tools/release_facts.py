# SPDX-License-Identifier: Apache-2.0
"""Checks what a release states about itself: ``release_facts.py [SDIST]``; ``--version`` prints the version.

Ends with 1 and a line for each fault. The address of the repository has to stand in pyproject.toml, in place of OWNER.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER"
SYSTEMS = (
    "Operating System :: MacOS",
    "Operating System :: Microsoft :: Windows",
    "Operating System :: POSIX :: Linux",
)
URLS = ("Homepage", "Documentation", "Issues", "Changelog")
MOST_SDIST_MIB = 32
# A wheel can be built from these, and read by whoever gets the archive.
SDIST_FILES = (
    "CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md",
    "optimizer/stof/__init__.py", "plugins/ort/library.cc",
)  # fmt: skip


def project_faults(pyproject: str, changelog: str) -> Iterator[str]:
    """What is wrong with the texts of pyproject.toml and CHANGELOG.md."""
    project = tomllib.loads(pyproject)["project"]
    version = project["version"]
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        yield f"pyproject.toml: the version is {version}, expected X.Y.Z, X.Y.ZaN, X.Y.ZbN or X.Y.ZrcN"
    section = re.search(rf"^## {re.escape(version)}( [^\n]*)?$\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        yield f"CHANGELOG.md has no section '## {version}': write what users see of it"
    else:
        if "unreleased" in (section[1] or ""):
            yield f"CHANGELOG.md: '## {version}{section[1]}' has no date: put it there, as in '## {version} (2026-01-31)'"
        if not re.search(r"^\* ", section[2], re.MULTILINE):
            yield f"CHANGELOG.md: the section of {version} has no entry"
    for system in SYSTEMS:
        if not any(c.startswith(system) for c in project["classifiers"]):
            yield f"pyproject.toml: no classifier '{system}', though there are wheels for it"
    urls = project.get("urls", {})
    if missing := [name for name in URLS if name not in urls]:
        yield f"pyproject.toml: [project.urls] has no {', '.join(missing)}"
    if any(PLACEHOLDER in url for url in urls.values()):
        yield (
            f"pyproject.toml: [project.urls] has the placeholder {PLACEHOLDER} for the repository's owner: replace it in all "
            "lines by the real address"
        )


def source_faults(version: str, sources: dict[str, str]) -> Iterator[str]:
    """Sources that state the version themselves. ``sources`` has texts by path."""
    for path, text in sources.items():
        for match in re.finditer(r"^.*version\w*\s*=.*$", text, re.MULTILINE | re.IGNORECASE):
            if f'"{version}"' in match[0]:
                yield f"{path}: {match[0].strip()!r} states the version, which stands in pyproject.toml alone"


def sdist_faults(path: Path) -> Iterator[str]:
    """What is wrong with a source distribution."""
    if path.stat().st_size > MOST_SDIST_MIB << 20:
        yield f"{path.name} has {path.stat().st_size / 2**20:.1f} MiB, expected at most {MOST_SDIST_MIB}"
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in SDIST_FILES if name not in names]:
        yield f"{path.name} lacks {', '.join(missing)}"
    if built := [n for n in names if n.startswith(("build/", "dist/", ".venv")) or n.endswith((".so", ".whl", ".pyc"))]:
        yield f"{path.name} has {len(built)} files that are built, for instance {min(built)}"


def main() -> int:
    """Prints the faults."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = tomllib.loads(pyproject)["project"]["version"]
    if sys.argv[1:] == ["--version"]:
        print(version)
        return 0
    listed = subprocess.run(
        ["git", "ls-files", "optimizer/stof/*.py", "plugins", "CMakeLists.txt", "cmake"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    sources = {name: (ROOT / name).read_text() for name in listed.stdout.splitlines()}
    faults = [*project_faults(pyproject, (ROOT / "CHANGELOG.md").read_text()), *source_faults(version, sources)]
    for argument in sys.argv[1:]:
        faults += sdist_faults(Path(argument))
    for fault in faults:
        print(f"release-check: {fault}")
    if not faults:
        print(f"release-check: {version} can be released")
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
