# SPDX-License-Identifier: Apache-2.0
"""stof beside its baselines on the CPU."""
