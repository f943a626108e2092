# SPDX-License-Identifier: Apache-2.0
"""What differs between Linux, macOS and Windows: open files, memory, processors, and calls of the Windows API."""
