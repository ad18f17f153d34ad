"""Small models in the styles of public code, each with its own equations: what finding recurrence is judged by.

`CASES` maps a name to a `Case`; `FAMILIES` says which file it stands in.

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_a_law_of_finding(case):
        model, (args, kwargs) = case.model(), case.inputs()
"""

from . import agents, cells, filters, loops, scans, states, variants
from .case import Case, Expected

FAMILIES = {
    "cells": cells.case,
    "variants": variants.case,
    "agents": agents.case,
    "states": states.case,
    "loops": loops.case,
    "scans": scans.case,
    "filters": filters.case,
}

CASES: dict[str, Case] = {one.name: one for family in FAMILIES.values() for one in family.cases}

__all__ = ["CASES", "FAMILIES", "Case", "Expected"]
