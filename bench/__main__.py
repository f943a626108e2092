# SPDX-License-Identifier: Apache-2.0
"""``python -m bench`` in the folder of a clone."""

import sys

from bench.cli import main

if __name__ == "__main__":  # worker processes import this module, too
    sys.exit(main())
