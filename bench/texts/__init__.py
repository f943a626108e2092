# SPDX-License-Identifier: Apache-2.0
"""Batches of padded texts on the CPU: useful tokens a second of stof and its peers, and the peak of their memory."""
