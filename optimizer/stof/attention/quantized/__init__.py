# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores or weights are rounded to 8 bits, in QDQ form, in QOperator form and with MatMulInteger."""
