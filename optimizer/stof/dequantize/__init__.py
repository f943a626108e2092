# SPDX-License-Identifier: Apache-2.0
"""``--dequantize-attention``: quantized attention computes in float, and outputs are held to those of the float model."""
