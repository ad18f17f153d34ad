"""Finding recurrence by what a model does: the state of a computation is what crosses from one repetition to the next.

model_call        one call of the model, the user's or one of our own; its changes are undone
  │
trace             each operation (operation), the values of tensors (memory), their names in the code (names),
  │               and where it happened: calls, loops and the turns of each (places, bytecode)
  │  analysis.analyze
chains            modules that are given their own earlier results   → stepped_cells ┐
crossings         values that cross from turn to turn in a loop      → loops         ┴→ candidates
  │               (repetition: a stretch of a trace, cut into turns)
replay            the law: turns run again from the parts alone must give the same, otherwise a candidate is dropped
  │
rows              the batch axis of each part, found by running the call again with a change in one row
attributes        state that modules keep from call to call
order             where pieces of the input cannot give what the whole gives (influence, handed_back)
mixing            operations beside what recurs that take several steps of a call at once
blind_spots       where something may recur unseen, and what a step or two cannot show
  │  search.find, search.find_in
found             recurrences with their parts, and what could not be decided

From the user's third call on, `taps` observes only the places that make the states of loops.
"""

from .found import Found, Part, Recurrence, Unsure
from .overriding import Overriding, Put
from .search import find, find_in
from .starts import LoopStart, OwnStart

__all__ = [
    "Found",
    "LoopStart",
    "Overriding",
    "OwnStart",
    "Part",
    "Put",
    "Recurrence",
    "Unsure",
    "find",
    "find_in",
]
