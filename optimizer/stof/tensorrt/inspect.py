# SPDX-License-Identifier: Apache-2.0
"""What an engine is made of: TensorRT's own inspector where there is a GPU, else what the file says of its plugins."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stof.errors import ArgumentError, ModelError, shown
from stof.files import read_bytes, strict_json
from stof.tensorrt.module import Messages, TensorrtError, find, find_library, load_plugins, logger

# TensorRT for RTX names the plugin layers of a plan in a table: "<layer>_pluginType".
_RECORD = re.compile(rb'name="([^"]{1,4096})_pluginType" size=(\d+) offset=(\d+)')
_PREFIX = "Stof"
_TYPE = re.compile(rb"Stof\w{1,64}\0")
_ANY_TYPE = re.compile(rb"\w{1,256}\0")


@dataclass(frozen=True)
class Layer:
    """One layer: its name, what it is, and whether it is one of stof's plugins."""

    name: str
    kind: str
    stof: bool


@dataclass(frozen=True)
class Contents:
    """The layers of an engine; without a GPU only the plugins among them."""

    engine: str
    source: str
    layers: tuple[Layer, ...]
    complete: bool

    def to_json(self) -> str:
        """Every fact as JSON."""
        return strict_json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """For the terminal."""
        ours = [layer for layer in self.layers if layer.stof]
        of = f" of {len(self.layers)}" if self.complete else ""
        lines = [f"{self.engine}: {len(ours)}{of} layers are stof's ({self.source})"]
        for layer in self.layers:
            lines.append(f"  {'stof' if layer.stof else '    '}  {layer.kind}  {layer.name}")
        return "\n".join(map(shown, lines))


def inspect_engine(engine: Path, module: str | None = None, verbose: bool = False, embedded: bool = False) -> Contents:
    """The layers of an engine.

    Raises:
        ArgumentError: for a file that cannot be read.
        ModelError: for a file that TensorRT does not read and that tells nothing by itself.
    """
    data = read_engine(engine)
    try:
        trt = find(module)
        messages = Messages(verbose)
        layers_read = _inspect_layers(trt, data, messages, embedded)
        why = messages.last() or "TensorRT does not deserialize it"
    except TensorrtError as error:
        layers_read, why = None, str(error)
    if layers_read is not None:
        return Contents(str(engine), f"{trt.__name__} {trt.__version__}", layers_read, True)
    layers = read_recorded_layers(data)
    if not layers:
        raise ModelError(f"{engine} cannot be inspected: {why}. The file by itself names no plugin layers either")
    return Contents(str(engine), f"by the file's own table, as it cannot be loaded here: {why}", layers, False)


def read_engine(path: Path) -> bytes:
    """The bytes of an engine file.

    Raises:
        ArgumentError: when it cannot be read or is empty.
    """
    data = read_bytes("engine", path)
    if not data:
        raise ArgumentError(f"the engine {path} is empty; build it again")
    return data


def deserialize(trt: Any, data: bytes, messages: Messages, embedded: bool = False) -> tuple[Any, Any]:
    """A runtime and the engine, None when TensorRT refuses it.

    ``embedded``: run the plugin library inside of the engine file, which then has to be trusted as a program is, instead of
    the installed one.

    Raises:
        TensorrtError: when the installed library does not load; that it is missing shows where an engine needs it.
    """
    runtime = trt.Runtime(logger(trt, messages))
    if embedded:
        runtime.engine_host_code_allowed = True
    elif find_library() is not None:
        load_plugins(trt)
    try:
        return runtime, runtime.deserialize_cuda_engine(data)
    except RuntimeError as error:
        messages.errors.append(str(error))
        return runtime, None


def _inspect_layers(trt: Any, data: bytes, messages: Messages, embedded: bool) -> tuple[Layer, ...] | None:
    # Without a driver a runtime cannot be made at all by some versions, by others not an engine.
    try:
        _, engine = deserialize(trt, data, messages, embedded)
    except (RuntimeError, TypeError) as error:
        messages.errors.append(str(error))
        return None
    if engine is None:
        return None
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return parse_layers(text)


def parse_layers(text: str) -> tuple[Layer, ...]:
    """The layers in the inspector's JSON: objects with DETAILED verbosity, names alone otherwise.

    Raises:
        TensorrtError: where the names in it, which are the model's, make it no such JSON.
    """
    try:
        entries = json.loads(text).get("Layers", [])
    except (ValueError, RecursionError, AttributeError) as error:
        raise TensorrtError(f"TensorRT's engine inspector gives no JSON: {error}") from error
    layers = []
    for layer in entries if isinstance(entries, list) else []:
        if isinstance(layer, str):
            layers.append(Layer(layer, "", _PREFIX in layer))
            continue
        if not isinstance(layer, dict):
            continue
        plugin = str(layer.get("PluginType", ""))
        kind = plugin or str(layer.get("LayerType", ""))
        layers.append(Layer(str(layer.get("Name", "")), kind, plugin.startswith(_PREFIX)))
    return tuple(layers)


def read_recorded_layers(data: bytes) -> tuple[Layer, ...]:
    """The plugin layers that a plan of TensorRT for RTX names; empty for other files.

    A table holds each layer's name with the place of its plugin's type, relative to a beginning that is not written there:
    it is the one at which every entry is a type.
    """
    records = [(m[1].decode(errors="backslashreplace"), int(m[2]), int(m[3])) for m in _RECORD.finditer(data)]
    for match in _TYPE.finditer(data):
        for _, size, offset in records:
            begin = match.start() - offset
            if size != len(match[0]) or begin < 0:
                continue
            types = [data[begin + at : begin + at + length] for _, length, at in records]
            if all(_ANY_TYPE.fullmatch(t) for t in types):
                names = [t[:-1].decode() for t in types]
                rows = zip(records, names, strict=True)
                return tuple(Layer(name, kind, kind.startswith(_PREFIX)) for (name, _, _), kind in rows)
    return ()
