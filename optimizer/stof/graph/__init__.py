# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs: files, use-def index, editor, names, inlining and dead code.

The lowest room: it imports nothing of stof but errors and file helpers.
"""
