# SPDX-License-Identifier: Apache-2.0
"""Compares sparse MLPs with what they replace."""
