# SPDX-License-Identifier: Apache-2.0
"""``genai_config.json`` of ONNX Runtime GenAI: the sessions that it names, and the library that they register.

The file is edited as text, so that every byte but the new value stays. It is untrusted: what the runtime would not read is
an error that names the file and the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from stof.errors import ArgumentError
from stof.files import read_text, strict_json

GENAI_CONFIG = "genai_config.json"
Key = tuple[str | int, ...]

_LIBRARY = "custom_ops_library"
_OPTIONS = "session_options"
_FILE = "filename"
_DECODER: Key = ("model", "decoder")  # sessions without options of their own take the decoder's
_DRAFT: Key = ("model", "draft")  # but a draft model never takes the decoder's
_MOST_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_parse_value = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class GenaiSession:
    """One session of the configuration.

    Attributes:
        key: where the model is named.
        model: its path in the model folder.
        options: the key of the ``session_options`` that it takes; there may be none yet.
        library: the ``custom_ops_library`` of these; None: none.
        providers: the names in their ``provider_options``; empty: the CPU.
    """

    key: Key
    model: Path
    options: Key
    library: str | None
    providers: tuple[str, ...]


@dataclass(frozen=True)
class GenaiConfig:
    """A configuration that was read and checked.

    Attributes:
        name: the file, for messages.
        text: what it holds.
        sessions: one for each model that it names.
    """

    name: str
    text: str
    sessions: tuple[GenaiSession, ...]

    def add_library(self, models: Collection[Path], library: str) -> tuple[str, tuple[str, ...]]:
        """The text in which the sessions of models register a library.

        Args:
            models: paths of the models that need it, in the model folder.
            library: its file name; it lies in the model folder.

        Returns:
            The text, and the keys that were set.

        Raises:
            ArgumentError: for a session that registers another library. There is room for one.
        """
        chosen = {s.options: s for s in self.sessions if s.model in models}
        text = self.text
        for options, session in chosen.items():
            if session.library not in (None, library):
                raise ArgumentError(
                    f"{self.name}: {show_key((*options, _LIBRARY))} is {session.library!r}; {session.model} needs {library}, and "
                    "ONNX Runtime GenAI registers one library for a session. Remove the key, or optimize other .onnx files alone"
                )
            text = _set_member(text, (*options, _LIBRARY), library)
        return text, tuple(show_key((*options, _LIBRARY)) for options in chosen)


def read_genai_config(path: Path) -> GenaiConfig:
    """Reads and checks a configuration.

    Raises:
        ArgumentError: naming the file and the key: for what the runtime would not read, for models outside of the folder.
    """
    text, name = read_text("configuration", path), str(path)
    try:
        data = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name} is no JSON: {error}") from error
    model = _check_object(name, ("model",), _check_object(name, (), data).get("model", {}))
    sessions = []
    for key, section in _find_models(name, ("model",), model):
        path_in_folder = _check_path(name, (*key, _FILE), section[_FILE])
        has_own = _OPTIONS in section or key in (_DECODER, _DRAFT)
        options = (*(key if has_own else _DECODER), _OPTIONS)
        library, providers = _find_options(name, options, data)
        sessions.append(GenaiSession((*key, _FILE), path_in_folder, options, library, providers))
    return GenaiConfig(name, text, tuple(sessions))


def show_key(key: Key) -> str:
    """A key as a text: ``model.decoder.pipeline[0].prompt``."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in key).removeprefix(".") or "the file"


def _find_models(
    name: str, key: Key, value: Mapping[str, object], depth: int = 0
) -> Iterator[tuple[Key, Mapping[str, object]]]:
    """Each object at a key and below that names the file of a model."""
    if depth > _MOST_DEPTH:
        raise ArgumentError(f"{name}: {show_key(key[:4])} is nested more than {_MOST_DEPTH} deep")
    if _FILE in value:
        yield key, value
    for inner, member in value.items():
        if inner == "pipeline" and isinstance(member, list):
            for i, stage in enumerate(member):
                at = (*key, inner, i)
                yield from _find_models(name, at, _check_object(name, at, stage), depth + 1)
        elif inner != _OPTIONS and isinstance(member, dict):
            yield from _find_models(name, (*key, inner), member, depth + 1)


def _check_object(name: str, key: Key, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{name}: {show_key(key)} is {_describe_kind(value)}, expected an object")
    return value


def _describe_kind(value: object) -> str:
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def _check_path(name: str, key: Key, value: object) -> Path:
    """The path that a configuration names, without ``.`` and ``..``.

    Raises:
        ArgumentError: where it is none, or leads out of the folder: the new folder would not hold that file.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        what = repr(value) if isinstance(value, str) else _describe_kind(value)
        raise ArgumentError(f"{name}: {show_key(key)} is {what}, expected the name of a file")
    path, parts = PurePosixPath(value), list[str]()
    is_outside = path.is_absolute() or bool(PureWindowsPath(value).drive)
    for part in path.parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            is_outside = True
    if is_outside or not parts:
        raise ArgumentError(
            f"{name}: {show_key(key)} is {value!r}, which is no file in its folder; copy that file into it, and name it there"
        )
    return Path(*parts)


def _find_options(name: str, options: Key, data: object) -> tuple[str | None, tuple[str, ...]]:
    """Library and providers of the options at a key; nothing where there are no options."""
    at = data
    for i, part in enumerate(options):
        if isinstance(part, int) and isinstance(at, list):
            at = at[part]
        else:
            members = _check_object(name, options[:i], at)
            if part not in members:
                return None, ()
            at = members[str(part)]
    section = _check_object(name, options, at)
    library = section.get(_LIBRARY, "")
    if not isinstance(library, str):
        raise ArgumentError(f"{name}: {show_key((*options, _LIBRARY))} is {_describe_kind(library)}, expected a string")
    entries = section.get("provider_options", [])
    providers = [str(k) for p in entries if isinstance(p, dict) for k in p] if isinstance(entries, list) else []
    return library or None, tuple(providers)


# ---- editing ----
def _set_member(text: str, key: Key, value: str) -> str:
    """JSON text in which the string at a key is ``value``; objects on the way to it that are absent are added."""
    start = _skip_space(text, 0)
    for i, part in enumerate(key):
        if isinstance(part, int):
            start = _find_elements(text, start)[part]
            continue
        members = _find_members(text, start)
        if part in members:
            start, end = members[part]
            continue
        added: object = value
        for outer in reversed(key[i + 1 :]):
            added = {outer: added}
        # The space behind the brace is repeated, so that the new member is indented as its neighbours are.
        space = text[start + 1 : _skip_space(text, start + 1)] if members else ""
        member = f"{json.dumps(part)}: {json.dumps(added)}{',' if members else ''}"
        return f"{text[: start + 1]}{space}{member}{text[start + 1 :] if members else text[_skip_space(text, start + 1) :]}"
    return f"{text[:start]}{json.dumps(value)}{text[end:]}"


def _find_members(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Start and end of each value of the object that begins at ``start``, by the member's name."""
    members = {}
    at = _skip_space(text, start + 1)
    while text[at] != "}":
        name, at = _parse_value(text, at)
        first = _skip_space(text, _skip_space(text, at) + 1)
        _, end = _parse_value(text, first)
        members[name] = (first, end)
        at = _skip_comma(text, end)
    return members


def _find_elements(text: str, start: int) -> list[int]:
    """Starts of the elements of the array that begins at ``start``."""
    starts = []
    at = _skip_space(text, start + 1)
    while text[at] != "]":
        starts.append(at)
        at = _skip_comma(text, _parse_value(text, at)[1])
    return starts


def _skip_comma(text: str, at: int) -> int:
    at = _skip_space(text, at)
    return _skip_space(text, at + 1) if text[at] == "," else at


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()
