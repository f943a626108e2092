# SPDX-License-Identifier: Apache-2.0
"""The plugin library: where it is, how a session registers it, and its C ABI as Python functions."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from stof.arguments import environment
from stof.errors import StofError
from stof.installation import CUDA, library_file, locate_library, missing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
LIBRARY = library_file("stof_ort")
EARLIER = (
    "it is of an earlier version than this package; install both of one version, or set STOF_LIBRARY to such a one"
)
ERROR_SIZE = 1024
# onnx.TensorProto.DataType of the NumPy types that the library reads; bfloat16 and float8_e4m3fn come from ml_dtypes.
DTYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
}


class LibraryError(StofError):
    """The library is missing, does not load, or refused a call."""

    exit_code = 1


def library_path() -> Path:
    """The path of the plugin library.

    The environment variable ``STOF_LIBRARY`` wins, for development; otherwise it is the one installed with the package.

    Raises:
        LibraryError: when there is none.
    """
    path, exists = locate_library(LIBRARY, environment.LIBRARY, LibraryError)
    if exists:
        return path
    raise LibraryError(
        f"{LIBRARY} is not installed beside the stof package: with a C++ compiler at hand, in stof's source folder: "
        "pip install . (or set STOF_LIBRARY to a built library)"
    )


def get_library_path() -> str:
    """The path of the plugin library as text, as ``onnxruntime_extensions.get_library_path()`` gives it.

    Raises:
        LibraryError: when there is none.
    """
    return str(library_path())


def register(options: Any) -> None:
    """Registers the operators with an ``onnxruntime.SessionOptions``.

    Warns where ONNX Runtime has a CUDA provider and the library no CUDA kernels: the operators then run on the CPU.
    """
    path = library_path()
    runtime = sys.modules.get("onnxruntime")  # the module that the options come from
    if (
        runtime is not None
        and "CUDAExecutionProvider" in runtime.get_available_providers()
        and "cuda" not in build_info()["backends"]
    ):
        warnings.warn(
            "stof's operators run on the CPU, in sessions of the CUDA provider too: the library has no CUDA kernels, "
            f"which are {missing(CUDA, path.parent)}",
            stacklevel=2,
        )
    options.register_custom_ops_library(str(path))


class Tensor(ctypes.Structure):
    """A dense row-major tensor as the library reads it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
    ]


class _Operand(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", Tensor)]


class _Sizes(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in "BHSTP"]


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("i", ctypes.c_int64),
        ("f", ctypes.c_double),
        ("s", ctypes.c_char_p),
    ]


class _BlockMaskView(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_int64) for n in ("S", "T", "P")],
        *[(n, ctypes.c_int32) for n in ("m", "n", "rows", "layout_b", "layout_h")],
        *[(n, ctypes.c_int64) for n in ("tables", "nnz", "distinct")],
        *[(n, ctypes.POINTER(ctypes.c_int32)) for n in ("layout", "row_ptr", "full_begin", "key_tile", "bits_id")],
        ("bits", ctypes.POINTER(ctypes.c_uint32)),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The plugin library, with the types of what it gives where ctypes would not guess them.

    Raises:
        LibraryError: when it is missing or does not load, and when an environment variable that it reads has a wrong value.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} does not load: {error}") from error
    loaded.stof_build_info.restype = ctypes.c_char_p
    if hasattr(loaded, "stof_op_limits"):  # op_limits says what to do where it is not there
        loaded.stof_op_limits.restype = ctypes.c_char_p
    loaded.stof_mask_hash.restype = ctypes.c_uint64
    loaded.stof_mask_print.restype = ctypes.c_size_t
    loaded.stof_fma_rate.restype = ctypes.c_double
    loaded.stof_fma_rate.argtypes = [ctypes.c_int, ctypes.c_double]
    loaded.stof_read_bandwidth.restype = ctypes.c_double
    loaded.stof_read_bandwidth.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_double]
    for name in ("stof_mask_destroy", "stof_block_mask_destroy", "stof_op_destroy", "stof_mask_hash"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
    loaded.stof_mask_print.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    if hasattr(loaded, "stof_environment"):
        loaded.stof_environment.restype = ctypes.c_char_p
        _raise_error(loaded.stof_environment_check)
    return loaded


def ask_name(symbol: str) -> str | None:
    """The text that a function of the plugin library without arguments gives; None: an earlier library lacks the function.

    Raises:
        LibraryError: without a library.
    """
    ask = getattr(library(), symbol, None)
    if ask is None:
        return None
    ask.restype = ctypes.c_char_p
    name: bytes = ask()
    return name.decode()


def build_info() -> dict[str, Any]:
    """Version, build id, backends and instruction set of the library."""
    info = json.loads(library().stof_build_info().decode())
    assert isinstance(info, dict)
    return info


def environment_variables() -> list[dict[str, Any]]:
    """The environment variables that the library reads: ``stof_environment`` in plugins/core/c_api/c_api.h has the keys.

    Empty for a library of an earlier version.
    """
    if not hasattr(library(), "stof_environment"):
        return []
    variables = json.loads(library().stof_environment().decode())
    assert isinstance(variables, list)
    return variables


def has_gemm() -> bool:
    """Whether the library has StofGemm."""
    try:
        return hasattr(library(), "stof_gemm_form")
    except LibraryError:
        return False


def op_limits() -> dict[str, Any]:
    """What each operator takes, by its name: ``stof_op_limits`` in plugins/core/c_api/c_api.h has the keys.

    Callers do not change it.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which cannot be asked.
    """
    ask = getattr(library(), "stof_op_limits", None)
    if ask is None:
        raise LibraryError(f"the plugin library does not state its limits (stof_op_limits): {EARLIER}")
    return _parse_limits(ask())


@functools.lru_cache(maxsize=4)
def _parse_limits(text: bytes) -> dict[str, Any]:
    """Each site asks for limits several times, and a library has one text."""
    limits = json.loads(text.decode())
    assert isinstance(limits, dict)
    return limits


def type_limits(op: str, target: str, limits: type[T]) -> dict[int, T]:
    """The limits of an operator on a target of ``--target``, by ONNX element type; types that are missing are not taken.

    Args:
        op: the operator.
        target: the target.
        limits: a dataclass whose fields are the limits.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which lacks the operator or a limit.
    """
    names = [f.name for f in fields(limits)]
    if op not in op_limits():
        raise LibraryError(f"the plugin library has no {op}: {EARLIER}")
    types = op_limits()[op]["targets"][target].get("types", {})
    for numbers in types.values():
        if missing_names := [n for n in names if n not in numbers]:
            raise LibraryError(f"the plugin library does not state {missing_names[0]} of {op}: {EARLIER}")
    return {int(t): limits(**{n: numbers[n] for n in names}) for t, numbers in types.items()}


def has_packed() -> bool:
    """Whether the library's StofAttention reads the heads of packed tensors: a library that does not ignores ``packed``."""
    return "packed" in op_limits()["StofAttention"].get("attributes", ())


def gemm_form(epilogue: str, pair: int) -> tuple[str, str]:
    """The form in which the CUDA kernels have an epilogue of StofGemm; empty, and the reason, where they have not."""
    form = ctypes.create_string_buffer(ERROR_SIZE)
    try:
        call("stof_gemm_form", epilogue.encode(), ctypes.c_int(pair), form, ctypes.c_size_t(ERROR_SIZE))
    except LibraryError as error:
        return "", str(error)
    return form.value.decode(), ""


def has_cpu_gemm() -> bool:
    """Whether the library has CPU kernels for fp32 GEMMs with constant weights."""
    try:
        return hasattr(library(), "stof_gemm_cpu_form")
    except LibraryError:
        return False


def cpu_gemm_form(epilogue: str, pair: int) -> tuple[str, str]:
    """The form in which the CPU's kernels apply an epilogue to what is in the cache; empty, and the reason, where they do not."""
    form = ctypes.create_string_buffer(ERROR_SIZE)
    try:
        call("stof_gemm_cpu_form", epilogue.encode(), ctypes.c_int(pair), form, ctypes.c_size_t(ERROR_SIZE))
    except LibraryError as error:
        return "", str(error)
    return form.value.decode(), ""


def fma_rate(threads: int = 1, seconds: float = 0.2) -> float:
    """The fp32 FMA rate of this machine in GFLOP/s."""
    return float(library().stof_fma_rate(threads, seconds))


def read_bandwidth(threads: int = 1, size: int = 1 << 28, seconds: float = 0.3) -> float:
    """The read bandwidth over ``size`` bytes in GB/s."""
    return float(library().stof_read_bandwidth(threads, size, seconds))


def tensor_of(array: np.ndarray) -> Tensor:
    """A view of an array, which has to outlive it."""
    if not array.flags.c_contiguous:
        raise ValueError("the library reads C-contiguous arrays")
    if array.dtype.name not in DTYPES or array.ndim > 8:
        raise ValueError(f"the library does not read {array.dtype} of rank {array.ndim}")
    return Tensor(
        array.ctypes.data if array.size else None,
        DTYPES[array.dtype.name],
        array.ndim,
        (ctypes.c_int64 * 8)(*array.shape),
    )


def shape_of(dtype: int, shape: Sequence[int]) -> Tensor:
    """A tensor of an ONNX type and a shape, without data.

    Raises:
        ValueError: when its rank is above 8.
    """
    if len(shape) > 8:
        raise ValueError(f"the library does not read tensors of rank {len(shape)}")
    return Tensor(None, dtype, len(shape), (ctypes.c_int64 * 8)(*shape))


def _operands(arrays: Mapping[str, np.ndarray]) -> tuple[Any, int]:
    items = [_Operand(name.encode(), tensor_of(array)) for name, array in arrays.items()]
    return (_Operand * max(1, len(items)))(*items), len(items)


def call(name: str, *args: Any) -> None:
    """Calls a function of the library that ends with a buffer for the message of an error.

    Raises:
        LibraryError: with that message.
    """
    _raise_error(getattr(library(), name), *args)


def _raise_error(function: Any, *args: Any) -> None:
    error = ctypes.create_string_buffer(ERROR_SIZE)
    if function(*args, error, ctypes.c_size_t(ERROR_SIZE)) != 0:
        raise LibraryError(error.value.decode(errors="replace"))


@dataclass(frozen=True)
class BlockMask:
    """A mask at tile granularity (plugins/core/mask/block_mask.h has the meaning of the arrays)."""

    m: int
    n: int
    rows: int
    layout: np.ndarray  # [1 or B, 1 or H]
    row_ptr: np.ndarray  # [tables * rows + 1]
    full_begin: np.ndarray  # [tables * rows]
    key_tile: np.ndarray  # [nnz]
    bits_id: np.ndarray  # [nnz]
    bits: np.ndarray  # [distinct, m, n / 32]

    def tile_density(self, T: int, first: int = 0) -> float:
        """Kept tiles over all tiles of the query rows from ``first`` on, averaged over the layouts' tables."""
        columns, begin = -(-T // self.n), first // self.m
        tables = len(self.full_begin) // max(1, self.rows)
        ends = self.row_ptr[np.arange(tables)[:, None] * self.rows + [begin, self.rows]]
        return int((ends[:, 1] - ends[:, 0]).sum()) / max(1, tables * (self.rows - begin) * columns)


class Mask:
    """A parsed mask expression."""

    def __init__(self, expression: str, tables: Mapping[str, np.ndarray] | None = None) -> None:
        self._handle = ctypes.c_void_p()
        operands, count = _operands({k: np.ascontiguousarray(v) for k, v in (tables or {}).items()})
        call("stof_mask_create", expression.encode(), operands, count, ctypes.byref(self._handle))

    def __del__(self) -> None:
        if self._handle:
            library().stof_mask_destroy(self._handle)

    def __str__(self) -> str:
        size = library().stof_mask_print(self._handle, None, 0)
        text = ctypes.create_string_buffer(size + 1)
        library().stof_mask_print(self._handle, text, size + 1)
        return text.value.decode()

    def hash(self) -> int:
        """A hash of expression and tables, the same on every machine."""
        return int(library().stof_mask_hash(self._handle))

    def evaluate(
        self, B: int, H: int, S: int, T: int, P: int = 0, runtime: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """The mask as booleans [B, H, S, T]."""
        allowed = np.zeros((B, H, S, T), np.uint8)
        arrays = {k: np.ascontiguousarray(v) for k, v in (runtime or {}).items()}
        operands, count = _operands(arrays)
        call(
            "stof_mask_eval",
            self._handle,
            ctypes.byref(_Sizes(B, H, S, T, P)),
            operands,
            count,
            ctypes.c_void_p(allowed.ctypes.data),
        )
        return allowed.astype(bool)

    def block_mask(self, B: int, H: int, S: int, T: int, m: int, n: int, P: int = 0) -> BlockMask:
        """The block mask of the static part, for tiles of m query rows × n keys."""
        handle = ctypes.c_void_p()
        sizes = ctypes.byref(_Sizes(B, H, S, T, P))
        call("stof_block_mask_create", self._handle, sizes, m, n, ctypes.byref(handle))
        try:
            view = _BlockMaskView()
            library().stof_block_mask_get(handle, ctypes.byref(view))

            def array(pointer: Any, *shape: int) -> np.ndarray:
                if 0 in shape:
                    return np.zeros(shape, np.int32)
                return np.array(np.ctypeslib.as_array(pointer, shape))

            tiles = int(view.tables) * view.rows
            return BlockMask(
                view.m,
                view.n,
                view.rows,
                array(view.layout, view.layout_b, view.layout_h),
                array(view.row_ptr, tiles + 1),
                array(view.full_begin, tiles),
                array(view.key_tile, view.nnz),
                array(view.bits_id, view.nnz),
                array(view.bits, view.distinct, view.m, view.n // 32),
            )
        finally:
            library().stof_block_mask_destroy(handle)


class Op:
    """An operator of the library, run without a runtime: for tests, benchmarks and the tuner.

    Attributes:
        name: of the operator.
    """

    def __init__(self, op_type: str, attributes: Mapping[str, int | float | str | Sequence[int]]) -> None:
        self.name = op_type
        self._handle = ctypes.c_void_p()
        items = []
        for name, value in attributes.items():
            kind = next((i for i, t in enumerate((int, float, str)) if isinstance(value, t)), 3)
            text = " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
            items.append(
                _Attribute(
                    name.encode(),
                    kind,
                    value if isinstance(value, int) else 0,
                    value if isinstance(value, float) else 0.0,
                    text.encode() if isinstance(text, str) else None,
                )
            )
        array = (_Attribute * max(1, len(items)))(*items)
        call("stof_op_create", op_type.encode(), array, len(items), ctypes.byref(self._handle))

    @property
    def handle(self) -> ctypes.c_void_p:
        """The ``stof_op`` of the C ABI, which this object owns."""
        return self._handle

    def __del__(self) -> None:
        if self._handle:
            library().stof_op_destroy(self._handle)

    def run(self, inputs: Sequence[np.ndarray | None], outputs: Sequence[np.ndarray], threads: int = 1) -> None:
        """Runs into ``outputs``, whose shapes must be the op's own. None is an input that is absent."""
        operands = (Tensor * len(inputs))(*[Tensor() if a is None else tensor_of(a) for a in inputs])
        results = (Tensor * len(outputs))(*[tensor_of(a) for a in outputs])
        call("stof_op_run", self._handle, operands, len(inputs), results, len(outputs), threads)

    def workspace(self, inputs: Sequence[Tensor], threads: int = 1) -> int | None:
        """Bytes that a run takes besides inputs and outputs, by types and shapes; constant inputs have data.

        None: the library is of an earlier version, which does not say it.

        Raises:
            LibraryError: where only a run can tell.
        """
        if not hasattr(library(), "stof_op_workspace"):
            return None
        size = ctypes.c_size_t()
        call(
            "stof_op_workspace", self._handle, (Tensor * len(inputs))(*inputs), len(inputs), threads, ctypes.byref(size)
        )
        return int(size.value)


def cache_stats(clear: bool = False) -> dict[str, int]:
    """The process-wide cache of block masks: entries, bytes, hits, misses, builds."""
    stats = (ctypes.c_int64 * 5)()
    library().stof_block_mask_cache_stats(stats, int(clear))
    return dict(zip(("entries", "bytes", "hits", "misses", "builds"), stats, strict=True))
