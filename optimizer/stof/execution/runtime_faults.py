# SPDX-License-Identifier: Apache-2.0
"""What some versions of ONNX Runtime's CPU provider refuse or do wrong, and stof works around: each asks the installed version.

docs/reference/support-matrix.md has the list for users. ``tools/test_parts/runtimes.sh`` runs optimized models in other versions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stof.errors import ArgumentError
from stof.execution.session_process import runtime_version

Version = tuple[int, int]
_OLDEST: Version = (1, 18)  # whose C API the library asks for


@dataclass(frozen=True)
class KnownFault:
    """A fault in words, and the versions that have it: all before ``fixed_in``; without it all known ones, up to ``seen_in``."""

    what: str
    seen_in: Version
    fixed_in: Version | None = None

    def is_in(self, version: Version) -> bool:
        """Whether a version has it. One that is newer than all known ones counts as the newest."""
        return self.fixed_in is None or version < self.fixed_in

    @property
    def versions(self) -> str:
        """The versions in words."""
        if self.fixed_in is not None:
            return f"before {self.fixed_in[0]}.{self.fixed_in[1]}"
        return f"up to {self.seen_in[0]}.{self.seen_in[1]} at least"


class RuntimeFault(enum.Enum):
    """The faults that verification works around. With ``--emit standard`` NO_ATTENTION_WINDOWS decides what is written, too."""

    ATTENTION_FUSION_ABORTS = KnownFault(
        "the optimizer `AttentionFusion` ends the process at a LayerNormalization without bias", (1, 18), (1, 19)
    )
    NO_DATA_FOLDER = KnownFault("no option names the folder of external data", (1, 20), (1, 21))
    SEVERAL_TOKENS_BEHIND_A_PAST = KnownFault(
        "`GroupQueryAttention` gives wrong numbers for several tokens behind a past", (1, 19), (1, 20)
    )
    SEVERAL_TOKENS_OF_A_BATCH = KnownFault(
        "`GroupQueryAttention` refuses several tokens behind pasts of several sequences", (1, 32)
    )
    PADDED_SLIDING_PROMPTS = KnownFault(
        "`GroupQueryAttention` refuses padded prompts over sliding-window caches", (1, 32)
    )
    HEAD_NORMS = KnownFault("`GroupQueryAttention` refuses RMS norms of query and key heads", (1, 32))
    NO_PAGED_ATTENTION = KnownFault("`PagedAttention` has no kernel", (1, 32))
    NO_ATTENTION_WINDOWS = KnownFault("`Attention` of opset 25 with window sizes is refused", (1, 31), (1, 32))
    SHORT_SPARSE_SEQUENCES = KnownFault("`SparseAttention` is wrong for sequences shorter than the total", (1, 32))

    def is_present(self) -> bool:
        """Whether the installed version has it.

        Raises:
            RuntimeFailure: when ONNX Runtime cannot be imported.
        """
        return self.value.is_in(runtime_version())


def refuse_old_runtimes() -> None:
    """Refuses an ONNX Runtime that cannot load the library, before anything takes long.

    Raises:
        ArgumentError: with both versions.
        RuntimeFailure: when ONNX Runtime cannot be imported.
    """
    installed_version = runtime_version()
    if installed_version < _OLDEST:
        installed, oldest = (".".join(map(str, version)) for version in (installed_version, _OLDEST))
        raise ArgumentError(
            f"ONNX Runtime {installed} is installed, which cannot load stof's library; expected {oldest} or later: "
            "pip install -U onnxruntime"
        )
