"""Why some files have no test file of their own: by folder, or for a single file.

Which test covers each of them is in `COVERED_ELSEWHERE`, in `tests/support/exceptions.py`.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple


class Elsewhere(NamedTuple):
    """Why files are covered by the test of something else."""

    why: str
    test: str = ""  # the one that covers all of them, where it is one


WHY_ELSEWHERE = {
    "carry": Elsewhere("what one call under Carry passes through: seen in what comes out, pieces equal the whole"),
    "cells/behavior": Elsewhere(
        "stages of one analysis, each fed by the one before: models are written as people write them, and what is "
        "found at the end is compared with what recurs in them"
    ),
    "diagnosis/rule.py": Elsewhere("types without behavior: every rule is one of them", "diagnosis/test_rules.py"),
    "diagnosis/rules": Elsewhere(
        "one law for all: `check_rule` runs on the sick and the healthy example in each rule's docstring, and each "
        "code has to be told first of a sick patient",
        "diagnosis/test_rules.py",
    ),
    "unrolling": Elsewhere("stages of the fast engine: values and gradients at its end are those of the plain loop"),
    "unrolling/native": Elsewhere(
        "what writes one C program: it is compiled and run, and gives the numbers and gradients of the plain loop"
    ),
    "unrolling/onchip": Elsewhere(
        "what writes one kernel: it is run on a chip made of threads, and gives the numbers of the plain loop",
        "unrolling/onchip/test_runner.py",
    ),
}


def group_of(file: str) -> str:
    """The line of the table that speaks of a file: its own, or that of its folder."""
    return file if file in WHY_ELSEWHERE else PurePosixPath(file).parent.as_posix()
