# SPDX-License-Identifier: Apache-2.0
"""Symbolic shapes and values of a graph's tensors.

``Symbolic(model)`` interprets a model once; ``shape``, ``dtype``, ``constant`` and ``value`` answer for any tensor name.
"""

from stof.symbolic.algebra.terms import Cond, Int, Real, dim, integer, var
from stof.symbolic.interpreter import Symbolic
from stof.symbolic.tensor import SymTensor

__all__ = ["Cond", "Int", "Real", "SymTensor", "Symbolic", "dim", "integer", "var"]
