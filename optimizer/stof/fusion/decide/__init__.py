# SPDX-License-Identifier: Apache-2.0
"""Which regions become fused chains: by measurement, by estimates, by the user."""
