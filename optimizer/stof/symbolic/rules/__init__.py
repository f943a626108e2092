# SPDX-License-Identifier: Apache-2.0
"""What each operator does to symbolic shapes and values, by kind of operator."""
