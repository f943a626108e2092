# SPDX-License-Identifier: Apache-2.0
"""The error kinds a user can meet; anything else is a bug.

A message names the node or tensor, what was found, what was expected and what to do.
"""

from __future__ import annotations


class StofError(Exception):
    """Base of every error that the command line turns into an exit code."""

    exit_code = 3


class ArgumentError(StofError):
    """A wrong argument or option, an unwritable output."""

    exit_code = 1


class VerifyError(StofError):
    """The optimized model does not give the original's outputs."""

    exit_code = 2


class ModelError(StofError):
    """The input model cannot be read or is not supported."""

    exit_code = 3


class UnsupportedError(StofError):
    """A site that stof cannot rewrite; carries the reason, becomes a finding in the report."""

    exit_code = 3


class GuardError(UnsupportedError):
    """What zeroes rows after the softmax cannot be shown to zero those without a key."""
