# SPDX-License-Identifier: Apache-2.0
"""The check by execution: a lifted mask beside the tensors of its graph."""
