# SPDX-License-Identifier: Apache-2.0
"""What benchmarks on every device share."""
