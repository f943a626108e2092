# SPDX-License-Identifier: Apache-2.0
"""How much memory a run of a model takes, by its graph and the sizes of its dimensions, without running it."""
