# SPDX-License-Identifier: Apache-2.0
"""The memory of an optimization's models, for the report and the limit that a user sets."""
