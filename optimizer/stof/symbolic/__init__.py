# SPDX-License-Identifier: Apache-2.0
"""Symbolic shapes and values of a graph's tensors.

``Symbolic(model)`` interprets a model once. Its methods ``shape``, ``dtype``, ``constant`` and ``value`` take a tensor's name.
Written by hand since general computer algebra is too slow for it: masks make millions of terms.
"""

from stof.symbolic.algebra.int_bounds import LONGEST
from stof.symbolic.algebra.terms import Cond, Int, Real, dim, integer, var
from stof.symbolic.interpreter import Symbolic
from stof.symbolic.tensor import SymTensor

__all__ = ["LONGEST", "Cond", "Int", "Real", "SymTensor", "Symbolic", "dim", "integer", "var"]
