# SPDX-License-Identifier: Apache-2.0
"""Biases that depend on the distance of key and query alone."""
