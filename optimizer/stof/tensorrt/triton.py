# SPDX-License-Identifier: Apache-2.0
"""A model repository for Triton Inference Server: the model, the library that it needs, and a configuration."""

from __future__ import annotations

from pathlib import Path

from stof.errors import ArgumentError, shown
from stof.files import temporary_file, temporary_folder, write_text
from stof.graph.external_data import external_files
from stof.graph.load_save import load
from stof.runtime.library import library_path
from stof.tensorrt.module import TensorrtError, plugin_path

_AUTOREG = "libstof_trt_autoreg{}.so"  # beside the plugin library: one for each major version of TensorRT
_ONNX = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 0
default_model_filename: "model.onnx"
instance_group [ {{ kind: {kind} }} ]
# The path is the server's; relative ones count from its working directory.
model_operations {{ op_library_filename: "{library}" }}
"""
_PLAN = """\
name: "{name}"
backend: "tensorrt"
max_batch_size: 0
default_model_filename: "model.plan"
instance_group [ {{ kind: KIND_GPU }} ]
# The server needs the plugins before it loads a model:
#   tritonserver --backend-config=tensorrt,plugins="{library}" ...
"""


def write_repository(
    folder: Path,
    name: str,
    *,
    onnx_model: Path | None = None,
    engine: Path | None = None,
    served_at: str | None = None,
    cpu: bool = False,
    major: int = 10,
) -> str:
    """Writes ``folder/name``, whole or not at all, and says how to serve it.

    Args:
        folder: the model repository; made if it does not exist.
        name: the model's name; it must not be there yet.
        onnx_model: for the onnxruntime backend, with stof's library as ``op_library_filename``.
        engine: for the tensorrt backend, with the plugin library beside it.
        served_at: where the server sees ``folder``.
        cpu: an instance on the CPU instead of the GPU, onnxruntime only.
        major: of the server's TensorRT.

    Raises:
        ArgumentError: wrong arguments, or a folder that cannot be written.
        ModelError: when the ONNX file is none.
        LibraryError, TensorrtError: when the library that the model needs is missing.
    """
    target = folder / name
    _check_arguments(target, name, onnx_model, engine, cpu)
    files = _onnx_files(onnx_model) if onnx_model is not None else _engine_files(engine, major)
    library = next(path for path in reversed(files) if path.suffix == ".so")
    base = (served_at or str(folder.resolve())).rstrip("/")
    served = f"{base}/{name}/{library}"
    if any(c in served for c in '"\\\n'):
        raise ArgumentError(f"the path {served!r} cannot be written into a configuration; choose one without quotes")
    kind = "KIND_CPU" if cpu else "KIND_GPU"
    text = (_PLAN if onnx_model is None else _ONNX).format(name=name, kind=kind, library=served)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as scratch:
            made = scratch / "model"
            for path, source in files.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                with temporary_file((made / path).parent) as new:
                    new.copy(source)
                    new.publish(made / path)
            write_text("configuration", made / "config.pbtxt", text.splitlines())
            made.rename(target)
    except OSError as error:
        raise ArgumentError(f"{target} cannot be written: {error.strerror or error}") from error
    serve = f"tritonserver --model-repository={base}"
    if onnx_model is None:
        serve += f' --backend-config=tensorrt,plugins="{served}"'
    lines = [f"{target}: {', '.join(str(p) for p in files)}", f"serve it by: {serve}"]
    return "\n".join(map(shown, lines))


def _check_arguments(target: Path, name: str, onnx_model: Path | None, engine: Path | None, cpu: bool) -> None:
    if (onnx_model is None) == (engine is None):
        raise ArgumentError("give either --onnx MODEL or --engine FILE")
    if cpu and engine is not None:
        raise ArgumentError("--cpu is for --onnx; engines run on the GPU")
    if not name or "/" in name or name.startswith("."):
        raise ArgumentError(f"--name {name!r}: expected the name of a folder, without slashes")
    if target.exists():
        raise ArgumentError(f"{target} exists; delete it, or choose another --name")


def _onnx_files(model: Path) -> dict[Path, Path]:
    """What goes into the repository, by its place there."""
    graph = load(model)
    version, library = Path("1"), library_path()
    files = {version / "model.onnx": model}
    for name in sorted(external_files(graph)):
        path = version / name
        if Path(name).is_absolute() or ".." in path.parts or path in files or path == version / library.name:
            raise ArgumentError(
                f"{model} has external data at {name!r}, which cannot stand beside it; save the model again"
            )
        files[path] = model.parent / name
    return files | {version / library.name: library}


def _engine_files(engine: Path | None, major: int) -> dict[Path, Path]:
    """The same for an engine; the library that the server opens comes last."""
    assert engine is not None
    if not engine.is_file():
        raise ArgumentError(f"the engine {engine} does not exist; stof-trt build makes one")
    plugin = plugin_path()
    # Triton opens plugin libraries with dlopen alone, so that one of them has to register itself; it loads the other.
    autoreg = plugin.with_name(_AUTOREG.format(major))
    if not autoreg.is_file():
        raise TensorrtError(
            f"{autoreg.name}, by which Triton finds the plugins, is not beside {plugin}: build it with the headers of "
            f"TensorRT {major}, or name another version with --tensorrt-major"
        )
    return {Path("1") / p.name: q for p, q in ((Path("model.plan"), engine), (plugin, plugin), (autoreg, autoreg))}
