# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save: tensors are read, and anything else is an error that names file and member."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.sparse_mlp.predictors.torch_files import (
    archive,
    dictionary,
    members_of,
    named,
    number,
    numbers,
    pickled,
    save,
    tensor,
    text,
)  # fmt: skip

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.torch_archives import read_tensors

RNG = np.random.default_rng(2)
VALUES = RNG.standard_normal((3, 5)).astype(np.float32)


def read(path: Path, data: bytes) -> dict[str, np.ndarray]:
    path.mkdir(exist_ok=True)
    (path / "some.pt").write_bytes(data)
    return read_tensors("predictor", path / "some.pt")


def with_pickle(content: bytes, **others: bytes) -> bytes:
    return archive({"saved/data.pkl": content, "saved/data/0": VALUES.tobytes(), **others})


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i8", "i4"])
def test_tensors_by_name(tmp_path: Path, ordered: bool, dtype: str) -> None:
    tensors = {"fc1.weight": (VALUES * 50).astype(dtype), "fc2.weight": (VALUES[:2] * 9).astype(dtype)}
    found = read_tensors("predictor", save(tmp_path / "a.pt", tensors, ordered))
    assert list(found) == list(tensors)
    for name, values in tensors.items():
        assert found[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found[name], values)


def test_one_tensor_has_no_name(tmp_path: Path) -> None:
    found = read_tensors("predictor", save(tmp_path / "a.pt", VALUES))
    assert list(found) == [""]
    np.testing.assert_array_equal(found[""], VALUES)


def test_bf16_becomes_fp32(tmp_path: Path) -> None:
    values = VALUES.astype(ml_dtypes.bfloat16)
    members = {"saved/data.pkl": pickled(tensor("0", "BFloat16Storage", 15, (3, 5))), "saved/data/0": values.tobytes()}
    found = read(tmp_path, archive(members))[""]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values.astype(np.float32))


def test_transposed_and_sliced_tensors(tmp_path: Path) -> None:
    transposed = pickled(tensor("0", "FloatStorage", 15, (5, 3), (1, 5)))
    np.testing.assert_array_equal(read(tmp_path, with_pickle(transposed))[""], VALUES.T)
    sliced = pickled(tensor("0", "FloatStorage", 15, (2, 3), (5, 1), offset=6))
    np.testing.assert_array_equal(read(tmp_path, with_pickle(sliced))[""], VALUES[1:, 1:4])


def test_parameters_are_tensors(tmp_path: Path) -> None:
    hooks = named("collections", "OrderedDict") + b")R"
    inner = tensor("0", "FloatStorage", 15, (3, 5))
    content = named("torch._utils", "_rebuild_parameter") + b"(" + inner + b"\x88" + hooks + b"tR"
    np.testing.assert_array_equal(read(tmp_path, with_pickle(pickled(content)))[""], VALUES)


def test_empty_tensors(tmp_path: Path) -> None:
    content = pickled(tensor("1", "FloatStorage", 0, (0, 5)))
    assert read(tmp_path, with_pickle(content, **{"saved/data/1": b""}))[""].size == 0


def test_later_protocols(tmp_path: Path) -> None:
    """Protocol 4 pushes names by STACK_GLOBAL and remembers by MEMOIZE."""
    content = pickled(tensor("0", "FloatStorage", 15, (3, 5)))[2:-1]
    content = content.replace(named("torch", "FloatStorage"), b"\x8c\x05torch\x94\x8c\x0cFloatStorage\x94\x93\x94")
    found = read(tmp_path, with_pickle(b"\x80\x04\x95" + struct.pack("<Q", len(content) + 1) + content + b"."))
    np.testing.assert_array_equal(found[""], VALUES)


class Attack:
    """Its pickle calls a function."""

    ran = False

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return setattr_ran, ("x",)


def setattr_ran(_: str) -> None:
    Attack.ran = True


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(ArgumentError, match=r"some\.pt cannot be read: saved/data\.pkl: "):
        read(tmp_path, with_pickle(pickle.dumps({"a": Attack()}, protocol)))
    assert not Attack.ran


GOOD = tensor("0", "FloatStorage", 15, (3, 5))
HUGE = 1 << 61


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickled(named("os", "system") + text("true") + b"\x85R"), "it names os.system; only tensors are read"),
        (pickled(named("builtins", "eval") + b")R"), "it names builtins.eval"),
        (pickled(named("torch", "load") + b")R"), "it names torch.load"),
        (pickled(b"\x8c\x02os\x8c\x06system\x93" + b")R"), "it names os.system"),
        (pickled(b"}\x8c\x06system\x93"), "a damaged pickle: dict where str is expected"),
        (pickled(named("torch", "FloatStorage") + b")R"), "it calls torch.FloatStorage, which makes no tensor"),
        (pickled(text("a") + b")R"), "a damaged pickle: str where _Global is expected"),
        (pickled(b"(ios\nsystem\n"), "the operation INST is none"),
        (pickled(b"]"), "the operation EMPTY_LIST is none"),
        (pickled(b"\x82\x01"), "the operation EXT1 is none"),
        (pickled(named("torch._utils", "_rebuild_tensor_v2") + b")R"), "a tensor without a storage"),
        (pickled(named("torch._utils", "_rebuild_parameter") + b")R"), "a parameter without a tensor"),
        (pickled(named("collections", "OrderedDict") + number(1) + b"\x85R"), "an OrderedDict with arguments"),
        (pickled(text("storage") + b"Q"), "it refers to something that is no storage"),
        (pickled(b"(" + text("storage") + b"NNNNtQ"), "the reference to a storage is damaged"),
        (pickled(tensor("1", "FloatStorage", 15, (3, 5))), "the member data/1 is missing"),
        (pickled(tensor("../version", "FloatStorage", 15, (3, 5))), r"the member data/\.\./version is missing"),
        (pickled(tensor("0", "FloatStorage", 16, (3, 5))), "data/0 has 60 bytes, expected 16 values of 4"),
        (
            pickled(tensor("0", "FloatStorage", HUGE, (3, 5))),
            "data/0 has 60 bytes, expected 2305843009213693952 values",
        ),
        (pickled(tensor("0", "HalfStorage", 15, (3, 5))), "data/0 has 60 bytes, expected 15 values of 2"),
        (
            pickled(tensor("0", "OrderedDict", 15, (3, 5)).replace(b"ctorch\nOrd", b"ccollections\nOrd")),
            "not supported",
        ),
        (pickled(tensor("0", "ComplexFloatStorage", 15, (3, 5))), "it names torch.ComplexFloatStorage"),
        (pickled(tensor("0", "FloatStorage", 15, (3, 6))), r"\[3, 6\] with strides \[6, 1\] does not lie in 15 values"),
        (pickled(tensor("0", "FloatStorage", 15, (3, 5), offset=1)), "does not lie in 15 values"),
        (pickled(tensor("0", "FloatStorage", 15, (HUGE, HUGE))), "does not lie in 15 values"),
        (pickled(tensor("0", "FloatStorage", 15, (1 << 40, 5), (0, 1))), r"strides \[0, 1\] does not lie in 15 values"),
        (pickled(tensor("0", "FloatStorage", 15, (2, 2), (HUGE, 1))), "does not lie in 15 values"),
        (pickled(tensor("0", "FloatStorage", 15, (3, 5), (5,))), "no lists of up to 8 sizes"),
        (pickled(tensor("0", "FloatStorage", 15, (1,) * 9)), "no lists of up to 8 sizes"),
        (pickled(GOOD.replace(numbers((3, 5)), b"(J\xff\xff\xff\xffJ\xff\xff\xff\xfft")), "no lists of up to 8 sizes"),
        (pickled(GOOD.replace(numbers((3, 5)), b"(\x88\x88t")), "no lists of up to 8 sizes"),
        (pickled(b"}" + text("a") + text("b") + b"s"), "'a' is no tensor"),
        (pickled(b"}" + text("a") + dictionary({}) + b"s"), "'a' is no tensor"),
        (pickled(b"}" + number(1) + GOOD + b"s"), "a name of a tensor is no text"),
        (pickled(b"}(" + GOOD + b"u"), "items without a dictionary"),
        (pickled(GOOD + b"(u"), "items without a dictionary"),
        (pickled(text("a")), "neither a tensor nor a dictionary of tensors"),
        (pickled(b""), "it takes a value that is not there"),
        (pickled(b"("), "_Mark where object is expected"),
        (pickled(b"t"), "arguments without a beginning"),
        (pickled(b"h\x07"), "it names a value that is not there"),
        (pickled(GOOD)[:-1], "a pickle without an end"),
        (b"", "a pickle without an end"),
        (pickled(GOOD)[:20], "a damaged pickle: a name without an end"),
        (pickled(b"c\xff\nx\n"), "a damaged pickle: "),
        (pickled(b"X\xff\xff\xff\xffabc"), "a damaged pickle: "),
        (pickled(b"\x8d" + b"\xff" * 8), "a damaged pickle: "),
        (b"\x80\x02" + b"N" * (1 << 20) + b".", "it has 1048579 bytes, expected up to 1048576"),
    ],
)
def test_pickles_of_anything_but_tensors_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"the predictor .*some\.pt cannot be read: saved/data\.pkl: .*{message}"):
        read(tmp_path, with_pickle(content))


def overlapping() -> bytes:
    """An archive whose directory names the values of one member ten times."""
    data = with_pickle(pickled(GOOD), **{f"saved/data/{i}": bytes(4000) for i in range(1, 2)})
    start = data.rindex(b"PK\x01\x02")
    start = data.rindex(b"PK\x01\x02", 0, data.rindex(b"PK\x05\x06"))
    end = data.rindex(b"PK\x05\x06")
    entry = data[start:end]
    entries = b"".join(entry.replace(b"saved/data/1", b"saved/data/%d" % i) for i in range(1, 10))
    count, size = struct.unpack_from("<HI", data, end + 10)
    tail = bytearray(data[end:])
    struct.pack_into("<HHI", tail, 8, count + 8, count + 8, size - len(entry) + len(entries))
    return data[:start] + entries + bytes(tail)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is no zip archive"),
        (
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
            r"no zip archive; save it again with torch\.save of PyTorch 1\.6",
        ),
        (b"PK\x03\x04", "it is a damaged zip archive"),
        (with_pickle(pickled(GOOD))[:-10], "it is a damaged zip archive"),
        (archive({"a": b"1"}), "0 members are named data.pkl, expected one"),
        (with_pickle(pickled(GOOD), **{"other/data.pkl": pickled(GOOD)}), "2 members are named data.pkl"),
        (archive({"saved/data.pkl": bytes(1 << 20)}, zipfile.ZIP_DEFLATED), "members are compressed"),
        (overlapping(), "members have .* bytes in a file of"),
    ],
)
def test_archives_of_another_kind_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"some\.pt cannot be read: the archive: .*{message}"):
        read(tmp_path, data)


def test_values_in_big_endian_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="values are not in little-endian order"):
        read(tmp_path, with_pickle(pickled(GOOD), **{"saved/byteorder": b"big"}))


def test_damaged_values_are_refused(tmp_path: Path) -> None:
    data = archive(members_of(VALUES))
    first = VALUES.tobytes()
    with pytest.raises(ArgumentError, match="it is a damaged zip archive: Bad CRC-32"):
        read(tmp_path, data.replace(first, first[:-1] + b"\x55"))


def test_one_storage_seen_by_many_tensors_is_refused(tmp_path: Path) -> None:
    """Each of them would be copied when it is used."""
    wide = bytes(1 << 20)
    content = pickled(dictionary({f"t{i}": tensor("0", "BFloat16Storage", 1 << 19, (1 << 19,)) for i in range(100)}))
    data = archive({"saved/data.pkl": content, "saved/data/0": wide})
    tracemalloc.start()
    with pytest.raises(ArgumentError, match="its tensors have 52428800 values in a file of"):
        read(tmp_path, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the predictor .*none\.pt does not exist"):
        read_tensors("predictor", tmp_path / "none.pt")


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    good = archive(members_of({"fc1.weight": VALUES, "fc2.weight": VALUES[:2]}))
    rng = random.Random(7)
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            i = rng.randrange(len(data))
            action = rng.randrange(3)
            if action == 0:
                data[i] = rng.randrange(256)
            elif action == 1:
                del data[i : i + rng.randrange(1, 40)]
            else:
                data[i:i] = rng.randbytes(rng.randrange(1, 9))
        try:
            read(tmp_path, bytes(data))
        except ArgumentError:
            refused += 1
    assert refused > 200


def test_mutated_pickles_are_read_or_refused(tmp_path: Path) -> None:
    """Behind a right checksum, so that the interpreter sees them."""
    members = members_of({"fc1.weight": VALUES, "fc2.weight": VALUES[:2]})
    rng = random.Random(8)
    refused = 0
    for _ in range(400):
        content = bytearray(members["saved/data.pkl"])
        for _ in range(rng.randrange(1, 4)):
            i = rng.randrange(len(content))
            content[i : i + rng.randrange(2)] = rng.randbytes(rng.randrange(1, 3))
        try:
            read(tmp_path, archive({**members, "saved/data.pkl": bytes(content)}))
        except ArgumentError:
            refused += 1
    assert refused > 250
