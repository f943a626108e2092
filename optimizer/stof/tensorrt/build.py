# SPDX-License-Identifier: Apache-2.0
"""From an optimized ONNX file to a TensorRT engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from stof.attention.function_body import OP
from stof.errors import ArgumentError, ModelError, shown
from stof.files import check_outputs, is_utf8, read_bytes, stat_file, write_bytes
from stof.graph.external_data import external_files
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.load_save import load
from stof.tensorrt.module import Messages, TensorrtError, find, is_rtx, load_plugins, logger
from stof.tensorrt.shapes import Ranges, Shape

CAPABILITIES = (75, 80, 86, 89, 120, 121)  # that TensorRT for RTX 1.7 builds for
_COMPATIBLE = {"none": "NONE", "ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True)
class BuildOptions:
    """What ``stof-trt build`` takes.

    ``least``, ``usual`` and ``most`` are shapes by the name of an input. ``plugins`` False computes stof's operators by their
    function bodies in standard ONNX, slowly. ``capabilities`` (86, 89, ...) are for TensorRT for RTX only.
    """

    least: dict[str, Shape] = field(default_factory=dict)
    usual: dict[str, Shape] = field(default_factory=dict)
    most: dict[str, Shape] = field(default_factory=dict)
    plugins: bool = True
    embed_plugins: bool = False
    version_compatible: bool = False
    hardware_compatible: str = "none"  # or "ampere+", "same"
    capabilities: tuple[int, ...] = ()
    timing_cache: Path | None = None
    workspace: int = 0  # MiB; 0: TensorRT's own limit
    optimization_level: int | None = None
    module: str | None = None  # of TensorRT, by default the first one that is installed
    verbose: bool = False


@dataclass(frozen=True)
class BuildReport:
    """An engine that was built."""

    model: str
    engine: str
    bytes: int
    tensorrt: str  # module and version
    nodes: tuple[str, ...]  # the model's stof nodes
    layers: tuple[str, ...]  # the network's layers that are stof's plugins
    inputs: tuple[tuple[str, tuple[Shape, Shape, Shape]], ...]
    warnings: tuple[str, ...] = ()

    def to_text(self) -> str:
        """For the terminal."""
        lines = [f"{self.engine}: {self.bytes} bytes, {self.tensorrt}"]
        for name, shapes in self.inputs:
            words = ["x".join(str(n) for n in s) or "scalar" for s in shapes]
            lines.append(f"  input {name}: {words[0] if len(set(words)) == 1 else ' .. '.join(words)}")
        if self.layers:
            lines.append(f"  {len(self.layers)} of {len(self.nodes)} stof nodes are plugin layers")
        elif self.nodes:
            lines.append(
                f"  {len(self.nodes)} stof nodes are computed by their bodies in standard ONNX, without the plugin"
            )
        else:
            lines.append(f"  the model holds no {OP}; stof-optimize --target tensorrt MODEL makes one that does")
        return "\n".join(map(shown, lines))


def build_engine(model: str | Path, engine: str | Path, options: BuildOptions | None = None) -> BuildReport:
    """Builds an engine and writes it, whole or not at all.

    The types are those of the graph (strong typing): a model in fp16 gives an engine in fp16.

    Raises:
        ArgumentError: wrong options, an output that cannot be written.
        ModelError: a model that TensorRT does not parse or build, with the node at fault and what TensorRT says.
        TensorrtError: TensorRT or the plugin library is missing, or has not what an option asks for.
    """
    options = options or BuildOptions()
    source, target = Path(model), Path(engine)
    if not is_utf8(source):
        raise ArgumentError(f"TensorRT takes no name that is not UTF-8, as that of the model {source}; rename it")
    graph = load(source)
    read = {"input": source, **{f"external data {n!r}": source.parent / n for n in sorted(external_files(graph))}}
    written = {"engine": target} | ({"timing cache": options.timing_cache} if options.timing_cache else {})
    check_outputs(read, written)
    nodes = stof_nodes(graph)
    trt = find(options.module)
    library = load_plugins(trt) if nodes and options.plugins else None
    return _Build(trt, options, source, target).run(nodes, library)


def stof_nodes(model: onnx.ModelProto) -> tuple[str, ...]:
    """The names of a model's stof nodes, outside of local functions."""
    return tuple(n.name for n in all_nodes(model.graph.node) if n.domain == DOMAIN)


def plugin_layers(trt: Any, network: Any) -> tuple[str, ...]:
    """The names of a network's plugin layers."""
    kind = trt.LayerType.PLUGIN_V3
    layers = (network.get_layer(i) for i in range(network.num_layers))
    return tuple(layer.name for layer in layers if layer.type == kind)


class _Build:
    """One build, with TensorRT's objects in the order in which they need each other."""

    def __init__(self, trt: Any, options: BuildOptions, source: Path, target: Path) -> None:
        self.trt = trt
        self.options = options
        self.source = source
        self.target = target
        self.messages = Messages(options.verbose)
        self.logger = logger(trt, self.messages)
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(self._flags())
        self.config = self.builder.create_builder_config()

    def _flags(self) -> int:
        kinds = self.trt.NetworkDefinitionCreationFlag
        return 1 << int(kinds.STRONGLY_TYPED) if hasattr(kinds, "STRONGLY_TYPED") else 0

    def run(self, nodes: Sequence[str], library: Path | None) -> BuildReport:
        self._configure(library)
        self._parse()
        layers = plugin_layers(self.trt, self.network)
        if self.options.plugins:
            self._check_layers(nodes, layers)
        elif library_is_there(self.trt):
            self._check_bodies(nodes, layers)
        inputs = self._profile()
        cache = self._timing_cache()
        plan = self.builder.build_serialized_network(self.network, self.config)
        if plan is None:
            raise ModelError(f"{self.trt.__name__} cannot build {self.source}: {self._last_message()}")
        data = memoryview(plan)
        write_bytes("engine", self.target, data)
        if cache is not None:
            assert self.options.timing_cache is not None
            write_bytes(
                "timing cache", self.options.timing_cache, memoryview(self.config.get_timing_cache().serialize())
            )
        version = f"{self.trt.__name__} {self.trt.__version__}"
        return BuildReport(
            str(self.source),
            str(self.target),
            data.nbytes,
            version,
            tuple(nodes),
            tuple(n for n in layers if n in nodes),
            inputs,
            tuple(self.messages.warnings),
        )

    def _last_message(self) -> str:
        return self.messages.last() or "no reason given; --verbose shows all of its messages"

    def _parse(self) -> None:
        parser = self.trt.OnnxParser(self.network, self.logger)
        if parser.parse_from_file(str(self.source)):
            return
        words = []
        for i in range(min(parser.num_errors, 3)):
            error = parser.get_error(i)
            node = f"node {error.node_name()!r} ({error.node_operator()})" if error.node_name() else "the model"
            words.append(f"{node}: {' '.join(str(error.desc()).split())[:400]}")
        raise ModelError(
            f"{self.trt.__name__} {self.trt.__version__} cannot parse {self.source}: {'; '.join(words) or self._last_message()}"
        )

    def _check_layers(self, nodes: Sequence[str], layers: Sequence[str]) -> None:
        missing = [n for n in nodes if n not in layers]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(nodes)} stof nodes did not become plugin layers, first {missing[0]!r}: their nodes "
                'need the attribute plugin_namespace = "stof"; optimize the original again with --target tensorrt'
            )

    def _check_bodies(self, nodes: Sequence[str], layers: Sequence[str]) -> None:
        if taken := [n for n in nodes if n in layers]:
            raise TensorrtError(
                f"node {taken[0]!r} became a plugin layer though plugins are off: this process loaded the plugin library "
                "before; use a process of its own"
            )

    def _profile(self) -> tuple[tuple[str, tuple[Shape, Shape, Shape]], ...]:
        options = self.options
        ranges = Ranges(options.least, options.usual, options.most)
        tensors = [self.network.get_input(i) for i in range(self.network.num_inputs)]
        ranges.check_names([t.name for t in tensors])
        profile = self.builder.create_optimization_profile()
        input_shapes = []
        dynamic = False
        for tensor in tensors:
            shape = tuple(int(n) for n in tensor.shape)
            if all(n >= 0 for n in shape):
                input_shapes.append((tensor.name, (shape, shape, shape)))
                continue
            dynamic = True
            shapes = ranges.of(tensor.name, shape)
            profile.set_shape(tensor.name, *shapes)
            input_shapes.append((tensor.name, shapes))
        if dynamic:
            self.config.add_optimization_profile(profile)
        return tuple(input_shapes)

    def _configure(self, library: Path | None) -> None:
        trt, options, config = self.trt, self.options, self.config
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # names and kinds of layers, for `inspect`
        if options.workspace:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace << 20)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.hardware_compatible not in _COMPATIBLE:
            raise ArgumentError(
                f"hardware compatibility {options.hardware_compatible!r}, expected one of {', '.join(_COMPATIBLE)}"
            )
        level = getattr(trt.HardwareCompatibilityLevel, _COMPATIBLE[options.hardware_compatible], None)
        if level is None:
            raise TensorrtError(
                f"{trt.__name__} {trt.__version__} has no hardware compatibility {options.hardware_compatible!r}"
            )
        if options.hardware_compatible != "none":
            config.hardware_compatibility_level = level
        self._capabilities()
        if options.embed_plugins:
            if library is None:
                raise ArgumentError(
                    f"--embed-plugins: {self.source} holds no node that a plugin computes; leave the option out"
                )
            config.plugins_to_serialize = [str(library)]

    def _capabilities(self) -> None:
        options, trt = self.options, self.trt
        if not options.capabilities:
            return
        if not is_rtx(trt):
            raise ArgumentError(
                f"--capability is for TensorRT for RTX; {trt.__name__} builds for the GPU of this machine, or for several by "
                "--hardware-compatible"
            )
        self.config.num_compute_capabilities = len(options.capabilities)
        for i, number in enumerate(options.capabilities):
            capability = getattr(trt.ComputeCapability, f"SM{number}", None)
            if capability is None or not self.config.set_compute_capability(capability, i):
                raise ArgumentError(
                    f"--capability {number}: {trt.__name__} {trt.__version__} does not build for it; it does for "
                    f"{', '.join(str(n) for n in CAPABILITIES)}"
                )

    def _timing_cache(self) -> Any:
        path = self.options.timing_cache
        if path is None:
            return None
        data = b"" if stat_file("timing cache", path) is None else read_bytes("timing cache", path)
        cache = self.config.create_timing_cache(data)
        if cache is None or not self.config.set_timing_cache(cache, False):
            raise ArgumentError(
                f"the timing cache {path} is none of {self.trt.__name__} {self.trt.__version__}; delete it"
            )
        return cache


def library_is_there(trt: Any) -> bool:
    """Whether this process has stof's plugins registered."""
    from stof.tensorrt.module import PLUGIN

    registry = trt.get_plugin_registry()
    return registry is not None and registry.get_creator(*PLUGIN) is not None
