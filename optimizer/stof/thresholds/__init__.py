# SPDX-License-Identifier: Apache-2.0
"""Skip by score and choose blocks: thresholds of attention nodes, stated or calibrated on runs, and the loss that they cost."""
