# SPDX-License-Identifier: Apache-2.0
"""Integers, conditions and floats over symbolic sizes and positions."""
