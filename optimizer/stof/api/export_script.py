# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint by Optimum, in a process of its own: ``python -P export_script.py MODEL FOLDER``.

``MODEL`` is a folder with a ``config.json`` and weights, or the id of a model on the hub. It imports nothing of stof, so that
PyTorch's memory and threads are gone when the optimizer begins.
"""

import json
import sys
from pathlib import Path
from typing import Any

# Generation steps with a KV cache; without it each token would be computed again.
_WITH_CACHE = ("text-generation", "text2text-generation", "automatic-speech-recognition", "image-to-text")
MODULES = "modules.json"  # of sentence-transformers: the classes of a model's modules
_OWN_CLASSES = "sentence_transformers."


def check_modules(name: str, text: str) -> None:
    """Refuses a ``modules.json`` that names classes which are not sentence-transformers' own.

    Versions of sentence-transformers before 6 run the code of a local folder without asking.

    Args:
        name: of the file.
        text: its content.

    Raises:
        ValueError: naming the file and the class.
    """
    try:
        modules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from None
    if not isinstance(modules, list):
        raise ValueError(f"{name} holds no list, expected one of modules")
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"{name} has a module without a type, expected the name of a class")
        if not kind.startswith(_OWN_CLASSES):
            raise ValueError(f"{name} names the module class {kind!r} of the checkpoint itself, which is not run")


def check_modules_on_hub(model: str) -> None:
    """Refuses a model of the hub as :func:`check_modules`, by its file on the hub.

    Raises:
        ValueError: naming the file and the class.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = hf_hub_download(model, MODULES)
    except EntryNotFoundError:
        return
    check_modules(f"{model}/{MODULES}", Path(path).read_text(encoding="utf-8"))


def find_task(model: str, library: str) -> str:
    """The task of a checkpoint, by the class that its configuration names.

    Optimum asks the hub for it, which knows no folder and may not be reachable.
    """
    if library == "sentence_transformers":
        return "feature-extraction"
    if library != "transformers":
        return "auto"
    import transformers
    from optimum.exporters.tasks import TasksManager

    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    names = config.architectures or []
    kinds: list[Any] = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    if not kinds:
        raise ValueError(f"config.json names the architectures {names}, expected one of transformers")
    task = TasksManager.infer_task_from_model(kinds[0])
    supported = TasksManager.get_supported_tasks_for_model_type(config.model_type, "onnx", library_name=library)
    if task not in supported and names[0].endswith("ForConditionalGeneration"):
        task = "text2text-generation"  # BART's class stands for several tasks, and the first one cannot be exported
    cached = f"{task}-with-past"
    return cached if task in _WITH_CACHE and cached in supported else str(task)


def main() -> None:
    """Exports ``MODEL`` into ``FOLDER``, and prints the task."""
    from optimum.exporters.onnx import main_export
    from optimum.exporters.tasks import TasksManager

    model, folder = sys.argv[1:]
    if not Path(model).is_dir():
        check_modules_on_hub(model)
    library = TasksManager.infer_library_from_model(model)
    task = find_task(model, library)
    # Verification compares the optimized model with this one; that this one is the checkpoint is the exporter's concern.
    main_export(model, folder, task=task, library_name=library, do_validation=False, trust_remote_code=False)
    print(task)


if __name__ == "__main__":
    main()
