"""Small models in the styles of public code, each with its own equations: what finding recurrence is judged by.

`CASES` maps a name to a `Case`; `FAMILIES` says which file it stands in.

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_a_law_of_finding(case):
        model, (args, kwargs) = case.model(), case.inputs()
"""

from . import (
    agents,
    attributes,
    cells,
    decoders,
    decoys,
    filters,
    iterations,
    layers,
    loops,
    memories,
    scans,
    states,
    timeless,
    variants,
    wrappers,
)
from .case import Case, Expected

FAMILIES = {
    "cells": cells.case,
    "variants": variants.case,
    "agents": agents.case,
    "states": states.case,
    "loops": loops.case,
    "scans": scans.case,
    "filters": filters.case,
    "layers": layers.case,
    "wrappers": wrappers.case,
    "attributes": attributes.case,
    "memories": memories.case,
    "decoders": decoders.case,
    "iterations": iterations.case,
    "decoys": decoys.case,
    "timeless": timeless.case,
}

CASES: dict[str, Case] = {one.name: one for family in FAMILIES.values() for one in family.cases}

__all__ = ["CASES", "FAMILIES", "Case", "Expected"]
