# SPDX-License-Identifier: Apache-2.0
"""Generated tests: random masks in random spellings inside random attention, held against what was drawn.

``python -m tests.generated --help`` runs any number of cases; ``test_generated.py`` is the part of it that CI runs.
"""
