# SPDX-License-Identifier: Apache-2.0
"""The platforms that stof has wheels for. As a script it prints a line for each: its name and the tag of its wheels.

It imports nothing but Python's own library: scripts ask it before they make an environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Platform:
    """What wheels for one platform look like. Patterns are those of fnmatch."""

    tag: str
    binary: str  # Binary.platform, and the name of the platform's file in cmake/toolchains
    libraries: tuple[str, ...]  # patterns, each of which one file or more match
    needed: tuple[str, ...]  # patterns of libraries that every machine of the tag has
    least_system: tuple[int, ...]  # the newest glibc or macOS that may be asked for

    def expected_name(self, file: str) -> str:
        """The name that a library gives itself."""
        return f"@rpath/{file}" if self.binary.startswith("macos") else file


_LINUX = ("libstof_ort.so", "libstof_trt.so", "libstof_trt_autoreg[0-9]*.so")
_GLIBC = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-*.so.*")
# wheels.sh builds and runs them in this order: the wheel of Linux x86-64 writes the models that the library of Windows runs.
PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "linux-x86_64", _LINUX, _GLIBC, (2, 28)),
    Platform("manylinux_2_28_aarch64", "linux-aarch64", _LINUX, _GLIBC, (2, 28)),
    Platform("macosx_11_0_arm64", "macos-arm64", ("libstof_ort.dylib",), ("/usr/lib/libSystem.B.dylib",), (11, 0)),
    Platform("win_amd64", "windows-x86_64", ("stof_ort.dll",), ("kernel32.dll", "ntdll.dll", "api-ms-win-crt-*.dll"), ()),
)  # fmt: skip


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


if __name__ == "__main__":
    for one in PLATFORMS:
        print(one.binary, one.tag)
