# SPDX-License-Identifier: Apache-2.0
"""Attention as the operator ``Attention`` of ONNX, for runtimes that load no library: ``--emit standard``."""
