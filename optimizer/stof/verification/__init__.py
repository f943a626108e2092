# SPDX-License-Identifier: Apache-2.0
"""The optimized model beside the original: inputs, runs, tolerances."""
