# SPDX-License-Identifier: Apache-2.0
"""The code signature of a Mach-O library: whether it covers the file as it is (Apple's cs_blobs.h has the layout)."""

from __future__ import annotations

import hashlib
import struct

_SUPER_BLOB, _CODE_DIRECTORY = 0xFADE0CC0, 0xFADE0C02
_SHA256 = 2
_AD_HOC = 0x2


def signature_fault(data: bytes, at: int) -> str:
    """What is wrong with the ad-hoc signature at an offset of the file; empty: nothing.

    macOS refuses a page whose hash is another, and ends the process. A tool that changes the file after it was signed, strip
    for instance, leaves such pages.
    """
    magic, _, count = struct.unpack_from(">III", data, at)
    if magic != _SUPER_BLOB:
        return f"the signature begins with {magic:#x}, expected {_SUPER_BLOB:#x}"
    for i in range(count):
        _, offset = struct.unpack_from(">II", data, at + 12 + 8 * i)
        start = at + offset
        fields = struct.unpack_from(">IIIIIIIII4B", data, start)
        magic, _, _, flags, hashes, _, _, pages, limit, hash_size, hash_type, _, log_page = fields
        if magic != _CODE_DIRECTORY:
            continue
        if not flags & _AD_HOC or hash_type != _SHA256:
            return f"flags {flags:#x} and hash type {hash_type}, expected ad hoc and SHA-256"
        page = 1 << log_page
        for slot in range(pages):
            found = hashlib.sha256(data[slot * page : min((slot + 1) * page, limit)]).digest()
            if found != data[start + hashes + slot * hash_size :][:hash_size]:
                return f"page {slot} of {pages} is not what was signed"
        return "" if limit == at else f"it covers {limit} bytes, expected {at}"
    return "it has no code directory"
