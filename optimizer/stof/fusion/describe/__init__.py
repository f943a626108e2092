# SPDX-License-Identifier: Apache-2.0
"""What regions ask of kernels, and the copies of a model in which regions are looked for."""
