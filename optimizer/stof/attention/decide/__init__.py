# SPDX-License-Identifier: Apache-2.0
"""Which sites are replaced, and by which kernel: estimated, measured, or said by the user."""
