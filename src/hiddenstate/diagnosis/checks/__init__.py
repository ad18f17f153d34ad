"""Every check, one for each code, gravest and most specific first."""

from __future__ import annotations

from collections.abc import Callable

from ..finding import Finding
from ..patient import Patient
from .bounds import within_bounds
from .cells import gates_differ, one_nonlinearity
from .future import no_future
from .keeping import caller_untouched, graph_ends, nothing_survives, same_in_eval
from .padding import padding_ignored
from .registration import dropout_between_layers, everything_registered, initial_state_trained, optimizer_complete
from .rows import any_batch_size, rows_apart, rows_in_order
from .slices import right_slice, whole_bidirectional
from .splitting import split_is_whole
from .states import alive, all_finite, not_saturated, rows_differ, steps_differ
from .through_time import not_exploding, not_vanishing
from .time import gradient_flows, input_used, state_used
from .unused import all_trained, gates_used

Check = Callable[[Patient], "Finding | list[Finding] | None"]

# Those that can say something of a model that cannot be called.
STATIC: dict[str, Check] = {
    "HS205": everything_registered,
    "HS504": optimizer_complete,
    "HS305": dropout_between_layers,
}

CHECKS: dict[str, Check] = {
    "HS401": all_finite,
    "HS207": caller_untouched,
    "HS203": graph_ends,
    "HS201": nothing_survives,
    "HS202": same_in_eval,
    "HS110": rows_in_order,
    "HS109": right_slice,
    "HS101": rows_apart,
    "HS107": whole_bidirectional,
    "HS103": state_used,
    "HS104": input_used,
    "HS105": gradient_flows,
    "HS106": padding_ignored,
    "HS102": no_future,
    "HS108": split_is_whole,
    "HS204": any_batch_size,
    "HS206": initial_state_trained,
    "HS205": everything_registered,
    "HS504": optimizer_complete,
    "HS301": one_nonlinearity,
    "HS304": within_bounds,
    "HS303": gates_differ,
    "HS302": gates_used,
    "HS403": alive,
    "HS402": not_saturated,
    "HS404": rows_differ,
    "HS405": steps_differ,
    "HS502": not_exploding,
    "HS501": not_vanishing,
    "HS503": all_trained,
    "HS305": dropout_between_layers,
}

__all__ = ["CHECKS", "STATIC"]
