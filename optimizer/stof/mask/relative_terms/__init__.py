# SPDX-License-Identifier: Apache-2.0
"""Terms of the scores that queries or keys make with a table of rows by relative position."""
