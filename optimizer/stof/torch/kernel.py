# SPDX-License-Identifier: Apache-2.0
"""Runs StofAttention of the plugin library on PyTorch tensors, on the CPU or a CUDA device."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from stof.mask.expression_nodes import is_table_name
from stof.runtime.library import ERROR_SIZE, LibraryError, Op, Tensor, call, library
from stof.torch.arguments import AttentionSettings

MOST_HANDLES = 128
_MOST_THREADS = 64  # that the library takes
_DTYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
}


class HandleCache:
    """The operators of the library that were made last, by attributes, tables and device.

    An operator that a CUDA graph captured stays for ever: a replay reads what it owns.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._handles: OrderedDict[Hashable, Op] = OrderedDict()
        self._captured: set[Hashable] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._handles)

    def get(
        self, key: Hashable, attributes: dict[str, int | float | str], constants: Sequence[Any], captures: bool
    ) -> Op:
        """The operator of a key, which is made where there is none.

        Args:
            key: says all that the operator depends on.
            attributes: of the operator.
            constants: its operands that are tables, in host memory; None for the others.
            captures: whether the run that follows is captured into a CUDA graph.
        """
        with self._lock:
            op = self._handles.get(key)
            if op is None:
                op = Op("StofAttention", attributes)
                inputs = [Tensor() if t is None else _view(t) for t in [None] * 3 + list(constants)]
                call("stof_op_prepare", op.handle, (Tensor * len(inputs))(*inputs), len(inputs))
                self._handles[key] = op
            self._handles.move_to_end(key)
            if captures:
                self._captured.add(key)
            others = (k for k in self._handles if k not in self._captured)
            for old in list(others)[: max(0, len(self._handles) - len(self._captured) - self.most)]:
                del self._handles[old]
            return op


HANDLES = HandleCache(MOST_HANDLES)


def run_attention(
    query: Any, key: Any, value: Any, operands: Sequence[Any], settings: AttentionSettings
) -> tuple[Any, Any]:
    """Output [B, H, S, Dv] and LSE [B, H, S] of checked arguments; a CUDA device runs it on the current stream.

    Raises:
        LibraryError: when the library is missing or refuses the call.
    """
    roles = settings.roles.split()
    on_cuda = query.device.type == "cuda"
    laid = [_with_layout(t) for t in (query, key, value)]
    # Tables belong to the operator: they are read in host memory, and copied from a device in each call.
    operand_tensors = [
        (t.detach().cpu() if is_table_name(r) else t.detach()).contiguous()
        for r, t in zip(roles, operands, strict=True)
    ]
    attributes: dict[str, int | float | str] = {
        "mask": settings.mask,
        "scale": float(settings.scale),
        "softcap": float(settings.softcap),
        "layout": " ".join([layout for _, layout in laid] + ["BHSD"]),
        "query_offset": int(settings.query_offset),
        "empty_rows": settings.empty_rows,
        "operands": settings.roles,
        "results": "lse",
    }
    B, H, S, _ = query.shape
    output = torch.empty((B, H, S, value.shape[3]), dtype=query.dtype, device=query.device)
    lse = torch.empty((B, H, S), dtype=torch.float32, device=query.device)
    inputs = [t for t, _ in laid] + operand_tensors
    digests = [_digest(t) for r, t in zip(roles, operand_tensors, strict=True) if is_table_name(r)]
    identity = (query.device.index if on_cuda else None, *attributes.values(), *digests)
    constants = [t if is_table_name(r) else None for r, t in zip(roles, operand_tensors, strict=True)]
    if on_cuda:
        with torch.cuda.device(query.device):
            op = HANDLES.get(identity, attributes, constants, torch.cuda.is_current_stream_capturing())
            _run_on_device(op, inputs, (output, lse), query.device)
    else:
        op = HANDLES.get(identity, attributes, constants, False)
        threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        views, results = _views(inputs), _views((output, lse))
        call("stof_op_run", op.handle, views, len(views), results, 2, threads)
    return output, lse


def _with_layout(tensor: Any) -> tuple[Any, str]:
    """A tensor [B, H, S, D] as a dense one and its layout: a transposed [B, S, H, D] is read in place."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor, "BHSD"
    rows_first = tensor.transpose(1, 2)
    if rows_first.is_contiguous():
        return rows_first, "BSHD"
    return tensor.contiguous(), "BHSD"


def _view(tensor: Any) -> Tensor:
    address = tensor.data_ptr() if tensor.numel() else None
    return Tensor(address, _DTYPES[tensor.dtype], tensor.dim(), (ctypes.c_int64 * 8)(*tensor.shape))


def _views(tensors: Sequence[Any]) -> Any:
    return (Tensor * len(tensors))(*[_view(t) for t in tensors])


def _digest(table: Any) -> Hashable:
    data = table.view(torch.uint8).numpy() if table.numel() else b""
    return table.dtype, tuple(table.shape), hashlib.blake2b(data).digest()


_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _run_on_device(op: Op, inputs: Sequence[Any], outputs: Sequence[Any], device: Any) -> None:
    """Queues the operator on the current stream.

    Its workspace comes from PyTorch's allocator, which gives the memory of this stream to later work of this stream only.
    """
    blocks: list[Any] = []
    failures: list[BaseException] = []

    def allocate(_: int | None, size: int) -> int | None:
        try:
            block = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        except BaseException as error:  # none may pass through the library's frames
            failures.append(error)
            return None
        blocks.append(block)
        return int(block.data_ptr())

    function = getattr(library(), "stof_op_run_cuda_allocating", None)
    if function is None:
        raise LibraryError("the plugin library is of an earlier version, which runs no operator for PyTorch on CUDA")
    stream = torch.cuda.current_stream(device).cuda_stream
    views, results = _views(inputs), _views(outputs)
    error = ctypes.create_string_buffer(ERROR_SIZE)
    status = function(
        op.handle, views, len(views), results, len(results), _Allocate(allocate), None, ctypes.c_void_p(stream), error,
        ctypes.c_size_t(ERROR_SIZE),
    )  # fmt: skip
    if failures:
        raise failures[0]
    if status != 0:
        raise LibraryError(error.value.decode(errors="replace"))
