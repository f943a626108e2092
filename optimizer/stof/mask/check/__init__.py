# SPDX-License-Identifier: Apache-2.0
"""The check by execution: compares a lifted mask with the tensors of its graph."""
