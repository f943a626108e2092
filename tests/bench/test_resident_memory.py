# SPDX-License-Identifier: Apache-2.0
"""Resident memory: pages that are read count, others do not; rows of neurons that are never active stay on disk."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import helper, numpy_helper

import stof
from bench.core.resident_memory import drop_cached_pages, mapped_resident_bytes, resident_bytes
from stof.errors import StofError
from stof.options import Options

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system tells no Pss")
MIB = 1 << 20
FORM = MlpForm(gated=True, size=512, neurons=2048)


def test_pages_that_are_read_are_resident(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8 * MIB))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped_resident_bytes(file) == 0
        sum(mapped[i] for i in range(0, 2 * MIB, 4096))
        assert 2 * MIB <= mapped_resident_bytes(file) <= 3 * MIB  # the system maps some pages ahead
        before = resident_bytes()
        sum(mapped[i] for i in range(0, 8 * MIB, 4096))
        assert mapped_resident_bytes(file) == 8 * MIB
        assert resident_bytes() - before >= 4 * MIB


def test_other_processes() -> None:
    command = [sys.executable, "-c", "held = b'x' * (8 << 20); print(len(held), flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert resident_bytes(other.pid) > 8 * MIB
        other.communicate(b"\n")
    with pytest.raises(StofError, match=r"/proc/\d+/smaps_rollup cannot be read"):
        resident_bytes(other.pid)


def test_idle_neurons_stay_on_disk(tmp_path: Path) -> None:
    """40 % of the neurons are never active: their rows, smaller than a page, are not mapped where neurons are in order."""
    model = make_mlp_model(FORM)
    bias = next(t for t in model.graph.initializer if t.name == "layers.0.gate.bias")
    rng = np.random.default_rng(5)
    values = np.where(rng.random(FORM.neurons) < 0.4, -50, 1).astype(np.float32)
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    source = tmp_path / "model.onnx"
    onnx.save(model, str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    feed = {
        "input_ids": rng.integers(0, VOCABULARY, (2, 20)),
        "past": rng.standard_normal((2, 3, FORM.size)).astype(np.float32),
    }
    np.savez(tmp_path / "inputs.npz", **feed)
    resident = []
    for name, inputs in (("plain", ()), ("ordered", (str(tmp_path / "inputs.npz"),))):
        target = tmp_path / name / "out.onnx"
        target.parent.mkdir()
        report = stof.optimize(source, target, Options(inputs=inputs, verify=False, chains="off"))
        (row,) = report.sections["mlps"].to_json()["mlps"]
        assert row["replaced"]
        assert (row["idle"] is None) == (name == "plain")
        files = list(target.parent.glob("*.data"))
        for file in files:
            drop_cached_pages(file)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        stof.register(options)
        session = ort.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
        for token in range(feed["input_ids"].shape[1]):  # as a decoder runs
            session.run(["logits"], {"input_ids": feed["input_ids"][:, token : token + 1], "past": feed["past"]})
        resident.append(sum(map(mapped_resident_bytes, files)))
        del session
    # Up and down are read by the operator; the gate's matmul reads all neurons, and ONNX Runtime packs its weight.
    idle = row["idle"] * 2 * 4 * FORM.size * FORM.neurons
    assert resident[0] >= 2 * 4 * FORM.size * FORM.neurons * 0.99
    assert resident[0] - resident[1] >= 0.85 * idle


_LOADER = """
import sys
import onnxruntime as ort
import stof
from pathlib import Path
from bench.core.resident_memory import drop_cached_pages, mapped_resident_bytes
drop_cached_pages(Path(sys.argv[2]))
options = ort.SessionOptions()
stof.register(options)
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(mapped_resident_bytes(Path(sys.argv[2])))
"""


def test_hot_rows_are_read_up_to_the_bound(tmp_path: Path) -> None:
    """STOF_MLP_HOT_MB reads the rows of hot neurons when a session is made, and no others."""
    size, neurons, hot = 512, 4096, 2048
    data = tmp_path / "w.data"
    with data.open("wb") as file:
        np.random.default_rng(0).standard_normal((neurons, size), np.float32).tofile(file)
    weight = onnx.TensorProto(name="down", dims=[neurons, size], data_type=onnx.TensorProto.FLOAT)
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.append(onnx.StringStringEntryProto(key="location", value=data.name))
    node = helper.make_node(
        "StofSparseMLP", ["gate", "gate", "", "", "down"], ["y"], domain="stof", activation="relu", hot_neurons=hot
    )
    given, found = (
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, d]) for n, d in (("gate", neurons), ("y", size))
    )
    graph = helper.make_graph([node], "mlp", [given], [found], [weight])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    resident = []
    for bound in (None, "1", "64"):
        environment = {k: v for k, v in os.environ.items() if k != "STOF_MLP_HOT_MB"}
        environment |= {} if bound is None else {"STOF_MLP_HOT_MB": bound}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", _LOADER, str(path), str(data)]
        resident.append(
            int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
        )
    ahead = 128 << 10  # what the system maps beyond a page
    assert resident[0] <= ahead
    assert MIB <= resident[1] <= MIB + ahead
    assert 4 * size * hot <= resident[2] <= 4 * size * hot + ahead
