# SPDX-License-Identifier: Apache-2.0
"""MLPs computed for some of their neurons: those that are not zero, or those that --sparse-mlp selects."""
