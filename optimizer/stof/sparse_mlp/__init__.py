# SPDX-License-Identifier: Apache-2.0
"""MLPs whose activation gives zeros, computed for the active neurons alone."""
