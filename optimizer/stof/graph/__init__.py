# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs: files, an index of uses, editing, subgraphs and local functions."""
