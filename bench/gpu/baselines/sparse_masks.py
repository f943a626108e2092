# SPDX-License-Identifier: Apache-2.0
"""Baselines of sparse masks: dense attention in their place, and ONNX Runtime's SparseAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import helper

from bench.core.candidate import Unavailable
from bench.gpu.baselines.onnx_runtime import MICROSOFT, Graph, graph_runner
from bench.gpu.cached import new_rows
from bench.gpu.device_runner import DeviceRunner
from bench.gpu.problem import GpuProblem
from stof.mask.expression import CAUSAL

_BLOCK = 64  # the only block that the CUDA kernels of SparseAttention take
_HEAD = 128  # and the only head size


class CausalProblem(GpuProblem):
    """The inputs of a problem under the dense causal mask."""

    def __init__(self, problem: GpuProblem) -> None:
        self._problem = problem
        mask = "" if problem.case.S == 1 else str(CAUSAL.text)
        super().__init__(replace(problem.case, mask=mask, tables={}), device=problem.device)

    @property
    def count(self) -> int:
        """The number of sets of the problem."""
        return self._problem.count

    @count.setter
    def count(self, value: int) -> None:
        """The problem alone decides."""

    def sets(self, layout: str = "BHSD") -> list[tuple[Any, Any, Any]]:
        """Those of the problem."""
        return self._problem.sets(layout)


def dense(build: Callable[[GpuProblem, Any], DeviceRunner]) -> Callable[[GpuProblem, Any], DeviceRunner]:
    """A candidate that attends all earlier keys in place of those that the mask names; its output is checked as such."""

    def made(problem: GpuProblem, stream: Any) -> DeviceRunner:
        plain = CausalProblem(problem)
        return replace(build(plain, stream), error=plain.error)

    return made


def layouts(problem: GpuProblem) -> np.ndarray:
    """The mask as blocks of 64, bool [heads, blocks, blocks], heads H or 1.

    Raises:
        Unavailable: when the mask is not causal with whole blocks beside the diagonal.
    """
    case = problem.case
    blocks = -(-case.T // _BLOCK)
    torch = problem.torch
    heads = torch.arange(case.H, device=problem.device)
    first = torch.arange(blocks, device=problem.device) * _BLOCK
    # A block stands for its first and last keys, of queries at both ends of theirs.
    found: list[np.ndarray] = []
    for row, column in ((_BLOCK - 1, 0), (_BLOCK - 1, _BLOCK - 1), (0, 0)):
        allowed = problem.allowed(0, heads[:, None, None], first[None, :, None] + row, first[None, None, :] + column)
        found.append(torch.broadcast_to(allowed, (case.H, blocks, blocks)).cpu().numpy())
    lower = np.tril(np.ones((blocks, blocks), bool))
    if any((other != found[0]).any() for other in found[1:]) or (found[0] & ~lower).any():
        raise Unavailable(f"expresses causal masks of whole blocks of {_BLOCK} only")
    are_alike = bool((found[0] == found[0][:1]).all())
    return found[0][:1] if are_alike else found[0]


def _csr(allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [layouts, blocks + 1] and columns [layouts, most], padded with -1."""
    counts = allowed.sum(2)
    rows = np.concatenate([np.zeros((len(allowed), 1), np.int64), counts.cumsum(1)], axis=1)
    columns = np.full((len(allowed), int(rows[:, -1].max())), -1)
    for i, layout in enumerate(allowed):
        found = np.nonzero(layout)[1]
        columns[i, : len(found)] = found
    return rows.astype(np.int32), columns.astype(np.int32)


def sparse_attention(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """com.microsoft SparseAttention over a cache that is past and present at once."""
    case, torch = problem.case, problem.torch
    if case.D != _HEAD:
        raise Unavailable(f"takes head size {_HEAD} alone")
    rows, columns = (torch.from_numpy(x).to(problem.device) for x in _csr(layouts(problem)))
    lengths = torch.full((case.B,), case.T, dtype=torch.int32, device=problem.device)

    def inputs(i: int) -> dict[str, Any]:
        _, k, v = problem.sets()[i]
        new = dict(zip("qkv", new_rows(problem, i), strict=True))
        return new | {"past_k": k, "past_v": v, "rows": rows, "columns": columns, "lengths": lengths}

    def others(i: int) -> dict[str, Any]:
        _, k, v = problem.sets()[i]
        return {"present_k": k, "present_v": v}

    names = ["q", "k", "v", "past_k", "past_v", "rows", "columns", "total", "lengths"]
    node = helper.make_node(
        "SparseAttention", names, ["y", "present_k", "present_v"], domain=MICROSOFT, num_heads=case.H,
        kv_num_heads=case.G, scale=problem.scale, sparse_block_size=_BLOCK,
    )  # fmt: skip
    graph = Graph(
        problem, [node], inputs, packed=True, domains=[(MICROSOFT, 1)], others=others,
        host={"total": np.array([case.T], np.int32)},
    )  # fmt: skip
    return graph_runner(graph, stream)
