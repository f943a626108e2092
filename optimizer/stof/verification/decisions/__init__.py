# SPDX-License-Identifier: Apache-2.0
"""Outputs whose lengths or indices a rounding decides: compared with the decisions of the original."""
