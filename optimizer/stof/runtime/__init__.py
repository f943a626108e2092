# SPDX-License-Identifier: Apache-2.0
"""The plugin library: its C ABI, and operators of it called without a runtime."""
