# SPDX-License-Identifier: Apache-2.0
"""``stof-bench model``: times a user's model before and after stof-optimize. The top-level ``bench/`` compares with peers."""
