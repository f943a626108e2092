# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint by Optimum, in a process of its own: ``python -P export_script.py MODEL FOLDER``.

``MODEL`` is a folder with a ``config.json`` and weights, or the id of a model on the hub. It imports nothing of stof, so that
PyTorch's memory and threads are gone when the optimizer begins.
"""

import sys
from typing import Any

# Generation steps with a KV cache; without it each token would be computed again.
_WITH_CACHE = ("text-generation", "text2text-generation", "automatic-speech-recognition", "image-to-text")


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

    config = transformers.AutoConfig.from_pretrained(model)
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
    library = TasksManager.infer_library_from_model(model)
    task = find_task(model, library)
    # Verification compares the optimized model with this one; that this one is the checkpoint is the exporter's concern.
    main_export(model, folder, task=task, library_name=library, do_validation=False)
    print(task)


if __name__ == "__main__":
    main()
