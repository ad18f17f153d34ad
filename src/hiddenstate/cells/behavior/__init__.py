"""Recurrence found by what a model does: the state of a computation is what crosses between repetitions.

model_call        one call of the model, the user's or one of our own; what it changed is put back
  │
trace             each operation (operation), what each tensor held (memory), what the code calls it (names),
  │               and where it happened: calls, loops and the turns of each (places, bytecode)
  │  analysis.analyze
chains            modules that are handed what they gave   → stepped_cells ┐
crossings         what crosses the turns of a loop         → loops         ┴→ candidates: recurrences in the making
  │               (repetition: a stretch of a trace, cut into turns)
replay            the law: turns that are run again from the parts alone give the same; else it is dropped
  │
rows              where each part has its rows, by running the call again with something else in one of them
attributes        what modules keep from call to call
order             where pieces of the input cannot give what the whole gives (influence, handed_back)
mixing            what takes several steps of a call at once beside what recurs
blind_spots       where something may recur out of sight, and what a step or two cannot show
  │  search.find, search.find_in
found             recurrences with their parts, and what could not be decided

From the third call of a user's on, `taps` looks only at the places that make the states of loops.
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
