# SPDX-License-Identifier: Apache-2.0
"""The error kinds a user can meet; anything else is a bug.

A message names the node or tensor, what was found, what was expected and what to do.
"""

from __future__ import annotations

_MOST_SHOWN = 3000  # characters of a message or a line of a report


def shown(text: object, most: int | None = _MOST_SHOWN) -> str:
    r"""Text of a model, a file or another library, fit for a message: one line that a terminal only prints.

    Control characters, marks of direction, separators of lines and bytes that are not UTF-8 become ``\x1b``, ``\u202e``,
    ``\n``, ``\xff``. Of text that is longer than ``most`` characters the middle is left out: a message begins with what is
    wrong and ends with what to do. To apply it again changes nothing.
    """
    words = _shorten(text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else str(text), most)
    if words.isprintable():
        return words
    return _shorten("".join(c if c.isprintable() else _escape(c) for c in words), most)


def _shorten(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    kept = max(0, most - 3)
    tail = kept // 3
    return f"{text[: kept - tail]}...{text[len(text) - tail :]}"


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return repr(character)[1:-1]


def explained(error: BaseException) -> str:
    """The message of another library's error, fit for a message of ours.

    ONNX Runtime quotes names of the model as they are; where one is not UTF-8, Python raises an error about that in the
    place of the message, which is still in there.
    """
    if isinstance(error, UnicodeDecodeError):
        return shown(error.object)
    return shown(error)


class StofError(Exception):
    """Base of every error that the command line turns into an exit code. Its message is fit for a terminal."""

    exit_code = 3

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(message))


class ArgumentError(StofError):
    """A wrong argument or option, an unwritable output."""

    exit_code = 1


class MemoryLimitError(ArgumentError):
    """The result is estimated to take more memory than the user allows."""


class VerifyError(StofError):
    """The optimized model does not give the original's outputs."""

    exit_code = 2


class ModelError(StofError):
    """The input model cannot be read or is not supported."""

    exit_code = 3


class InputsRefusedError(ModelError):
    """ONNX Runtime runs the original on none of the inputs."""


class UnsupportedError(StofError):
    """A site that stof cannot rewrite; carries the reason, becomes a finding in the report."""

    exit_code = 3


class GuardError(UnsupportedError):
    """What zeroes rows after the softmax cannot be shown to zero those without a key."""
