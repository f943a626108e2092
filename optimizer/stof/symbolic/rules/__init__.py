# SPDX-License-Identifier: Apache-2.0
"""Rules: what each operator does to symbolic shapes and values, in a file for each kind of operator."""
