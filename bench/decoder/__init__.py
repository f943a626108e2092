# SPDX-License-Identifier: Apache-2.0
"""A whole decoder before and after: time of a token and of a prompt, on a GPU or a CPU."""
