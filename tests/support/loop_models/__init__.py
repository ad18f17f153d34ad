"""Models with loops over time, written as people write them: what rolling a loop is judged by.

`LOOP_MODELS` maps a name to a `LoopCase`; `outcome` gives all that one call leaves, to be compared with another.
None of these models knows of this library. Families up to `manners` are plain loops, most of them to be rolled; in the
others rolling must not change anything. After `case.inputs`, try `case.surprise` and `case.later` where there are any.

    @pytest.mark.parametrize("case", LOOP_MODELS.values(), ids=LOOP_MODELS)
    def test_a_law_of_rolling(case):
        plain = outcome(case, case.model(), case.inputs(3, 7))
        rolled = outcome(case, rolling(case.model()), case.inputs(3, 7))
        assert plain.differences(rolled, atol=1e-5) == []
"""

from . import (
    arguments,
    by_data,
    by_index,
    calls,
    cells,
    collected,
    decoders,
    domains,
    dynamics,
    effects,
    forms,
    gates,
    lengths_apart,
    linear,
    manners,
    memories,
    papers,
    reading,
    stacks,
    ways_of_time,
)
from .case import LoopCase
from .comparing import Outcome, outcome

FAMILIES = (
    gates.case,
    cells.case,
    papers.case,
    dynamics.case,
    linear.case,
    domains.case,
    stacks.case,
    memories.case,
    forms.case,
    reading.case,
    collected.case,
    manners.case,
    by_index.case,
    ways_of_time.case,
    lengths_apart.case,
    by_data.case,
    decoders.case,
    effects.case,
    calls.case,
    arguments.case,
)

LOOP_MODELS: dict[str, LoopCase] = {name: case for family in FAMILIES for name, case in family.cases.items()}

if len(LOOP_MODELS) != sum(len(family.cases) for family in FAMILIES):
    raise ValueError("two families have a case of the same name")

__all__ = ["FAMILIES", "LOOP_MODELS", "LoopCase", "Outcome", "outcome"]
