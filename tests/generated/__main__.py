# SPDX-License-Identifier: Apache-2.0
"""The command line of the generated tests."""

from __future__ import annotations

import argparse
import sys
import time

from .mutated import mutant_report, run_mutants
from .run import far_report, report, run_cases, run_far


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many cases (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=None, help="where the cases come from; drawn and printed if not given"
    )
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many minutes, or go on so long")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--mutants", type=int, default=0, help="how many changed exports besides (default %(default)s)")
    parser.add_argument("--reasons", type=int, default=25, help="reasons of refused sites to print")
    parser.add_argument("--far", type=int, default=0, help="how many cases with large constants, instead of others")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 1_000_000
    print(f"seed {seed}", flush=True)
    if arguments.far:
        far = run_far(seed, arguments.far, first=arguments.first, workers=arguments.workers)
        print(far_report(far))
        return 1 if far.faults else 0
    result = run_cases(
        seed, arguments.cases, first=arguments.first, minutes=arguments.minutes, workers=arguments.workers
    )
    print(report(result, reasons=arguments.reasons))
    mutants = run_mutants(seed, arguments.mutants, workers=arguments.workers)
    if mutants:
        print(mutant_report(mutants))
    return 1 if result.faults or result.caught or any(o.state == "wrong" for o in mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
