# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, of the Python API and of the commands."""
