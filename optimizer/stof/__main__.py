# SPDX-License-Identifier: Apache-2.0
"""python -m stof."""

import sys

from stof.cli import main

sys.exit(main())
