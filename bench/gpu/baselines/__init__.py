# SPDX-License-Identifier: Apache-2.0
"""What stof is timed beside on a GPU."""
