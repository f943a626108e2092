# SPDX-License-Identifier: Apache-2.0
"""Texts whose padding the result leaves out: their batches, longer padding of quantized ones, lengths to time."""
