# SPDX-License-Identifier: Apache-2.0
"""What the header of a shared library says: its platform, what it needs, and what it exports. ELF, PE and Mach-O."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pefile
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from macho_signature import signature_fault
from macholib import mach_o
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

_OF_LINKER = {"__dso_handle", "_mh_dylib_header"}  # addresses of the library itself, which zig's linker lists
_MACHO_MAGIC = bytes.fromhex("cffaedfe")


@dataclass(frozen=True)
class Binary:
    """A shared library. ``platform`` is ``linux-x86_64``, ``linux-aarch64``, ``macos-arm64`` or ``windows-x86_64``."""

    platform: str
    name: str  # soname, install name, or the name in the export table; empty without one
    needed: tuple[str, ...]
    exports: frozenset[str]
    least_system: tuple[int, ...]  # glibc's version, or that of macOS; empty where nothing is asked for
    search_paths: tuple[str, ...]  # RPATH and RUNPATH
    signature_fault: str  # empty where the signature is right, and where the platform asks for none
    has_debug_sections: bool


def read_binary(data: bytes) -> Binary:
    """Reads a library.

    Raises:
        ValueError: the file has another format, or is for another processor.
    """
    if data.startswith(b"\x7fELF"):
        return _read_elf(data)
    if data.startswith(b"MZ"):
        return _read_pe(data)
    if data.startswith(_MACHO_MAGIC):
        return _read_macho(data)
    raise ValueError(f"the file begins with {data[:4].hex()}, expected an ELF, PE or 64-bit Mach-O library")


def _read_elf(data: bytes) -> Binary:
    elf = ELFFile(io.BytesIO(data))
    platforms = {"EM_X86_64": "linux-x86_64", "EM_AARCH64": "linux-aarch64"}
    if elf["e_machine"] not in platforms:
        raise ValueError(f"the ELF file is for {elf['e_machine']}, expected one of {sorted(platforms)}")
    name, needed, paths = "", [], []
    exports: set[str] = set()
    glibc: tuple[int, ...] = ()
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(tag.needed)
                elif tag.entry.d_tag == "DT_SONAME":
                    name = tag.soname
                elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    paths.append(tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath)
        elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
            exports |= {
                symbol.name
                for symbol in section.iter_symbols()
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL" and symbol.name
            }
        elif isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if found := re.fullmatch(r"GLIBC_([\d.]+)", version.name):
                        glibc = max(glibc, tuple(map(int, found[1].split("."))))
    has_debug = any(section.name.startswith(".debug") for section in elf.iter_sections())
    return Binary(
        platforms[elf["e_machine"]], name, tuple(needed), frozenset(exports), glibc, tuple(paths), "", has_debug
    )


def _read_pe(data: bytes) -> Binary:
    pe = pefile.PE(data=data)
    if pe.FILE_HEADER.Machine != pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"]:
        raise ValueError(f"the PE file is for machine {pe.FILE_HEADER.Machine:#x}, expected x86-64")
    needed = tuple(entry.dll.decode() for entry in getattr(pe, "DIRECTORY_ENTRY_IMPORT", ()))
    table = getattr(pe, "DIRECTORY_ENTRY_EXPORT", None)
    exports = frozenset(symbol.name.decode() for symbol in table.symbols if symbol.name) if table else frozenset()
    name = table.name.decode() if table and table.name else ""
    has_debug = any(section.Name.startswith((b".debug", b"/")) for section in pe.sections)
    return Binary("windows-x86_64", name, needed, exports, (), (), "", has_debug)


def _read_macho(data: bytes) -> Binary:
    macho = MachO.__new__(MachO)
    macho.graphtag, macho.filename, macho.loader_path, macho.fat, macho.headers = None, "library", "", None, []
    macho.allow_unknown_load_commands = True
    macho.load(io.BytesIO(data))
    (header,) = macho.headers
    if header.header.cputype != 0x100000C:
        raise ValueError(f"the Mach-O file is for processor type {header.header.cputype:#x}, expected arm64")
    name, needed, paths, least, fault, has_debug = "", [], [], (), "there is none", False
    for load, command, text in header.commands:
        if load.cmd == mach_o.LC_ID_DYLIB:
            name = _text(text)
        elif load.cmd in (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB, mach_o.LC_REEXPORT_DYLIB):
            needed.append(_text(text))
        elif load.cmd == mach_o.LC_RPATH:
            paths.append(_text(text))
        elif load.cmd == mach_o.LC_CODE_SIGNATURE:
            fault = signature_fault(data, command.dataoff)
        elif load.cmd == mach_o.LC_BUILD_VERSION:
            least = (command.minos >> 16, command.minos >> 8 & 0xFF)
        elif load.cmd == mach_o.LC_SEGMENT_64:
            has_debug |= command.segname.rstrip(b"\0") == b"__DWARF"
    symbols = SymbolTable(macho, openfile=lambda *_: io.BytesIO(data))
    exports = frozenset(symbol.decode().removeprefix("_") for entry, symbol in symbols.extdefsyms) - _OF_LINKER
    return Binary("macos-arm64", name, tuple(needed), exports, least, tuple(paths), fault, has_debug)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()
