# SPDX-License-Identifier: Apache-2.0
"""What the library's kernels can do, and what they are predicted to cost."""
