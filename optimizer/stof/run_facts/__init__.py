# SPDX-License-Identifier: Apache-2.0
"""How, when and where a report was made: the command, the machine, versions and file sizes."""
