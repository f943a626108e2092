# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint by Optimum, in a process of its own: ``python -P export_script.py MODEL FOLDER``.

``MODEL`` is a folder with a ``config.json`` and weights, or the id of a model on the hub. It imports nothing of stof, so that
PyTorch's memory and threads are gone when the optimizer begins.
"""

import sys
from pathlib import Path
from typing import Any

# Generation steps with a KV cache; without it each token would be computed again.
_WITH_CACHE = ("text-generation", "text2text-generation", "automatic-speech-recognition", "image-to-text")


def find_task(model: str, library: str) -> str:
    """The task of a checkpoint: Optimum finds that of a model on the hub, not that of a folder."""
    if not Path(model).is_dir():
        return "auto"
    if library == "sentence_transformers":
        return "feature-extraction"
    if library != "transformers":
        raise ValueError(f"a folder of the library {library} does not say which task to export it for")
    import transformers
    from optimum.exporters.tasks import TasksManager

    config = transformers.AutoConfig.from_pretrained(model)
    names = config.architectures or []
    kinds: list[Any] = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    if not kinds:
        raise ValueError(f"config.json names the architectures {names}, expected one of transformers")
    task = TasksManager.infer_task_from_model(kinds[0])
    cached = f"{task}-with-past"
    supported = TasksManager.get_supported_tasks_for_model_type(config.model_type, "onnx", library_name=library)
    return cached if task in _WITH_CACHE and cached in supported else str(task)


def main() -> None:
    """Exports ``MODEL`` into ``FOLDER``, and prints the task."""
    from optimum.exporters.onnx import main_export
    from optimum.exporters.tasks import TasksManager

    model, folder = sys.argv[1:]
    library = TasksManager.infer_library_from_model(model)
    task = find_task(model, library)
    # Verification compares the optimized model with this one; that this one is the checkpoint is the exporter's concern.
    main_export(model, folder, task=task, library_name=library, do_validation=False)
    print(task)


if __name__ == "__main__":
    main()
