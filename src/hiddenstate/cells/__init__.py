"""Who makes the next state: recurrent layers and cells, found in any model, and their calls, heard in one place."""

from typing import TYPE_CHECKING

from .adapter import Adapter, Spec
from .call import Call
from .cell import Cell
from .custom import CellAdapter
from .finding import ambiguous, as_layer, has_own_code, layers, register, unwrap
from .invented import invented_inputs
from .layer import Layer, Layers
from .listener import (
    Arguments,
    Entry,
    Handle,
    Listener,
    Proceed,
    Rank,
    around,
    attributes,
    listen,
    listeners,
    may_be_recomputed,
    recomputing,
)
from .native import Form, flatten, rebuild
from .uncompiled import uncompiled
from .unheard import unheard
from .untouched import Snapshot, plain_object, random_streams_kept, seed, untouched
from .warning import warn
from .watched import foreseen, watched, when_reached

if TYPE_CHECKING:
    from .behavior import Part as Part

__all__ = [
    "Adapter",
    "Arguments",
    "Call",
    "Cell",
    "CellAdapter",
    "Entry",
    "Form",
    "Handle",
    "Layer",
    "Layers",
    "Listener",
    "Proceed",
    "Rank",
    "Snapshot",
    "Spec",
    "ambiguous",
    "around",
    "as_layer",
    "attributes",
    "flatten",
    "foreseen",
    "has_own_code",
    "invented_inputs",
    "layers",
    "listen",
    "listeners",
    "may_be_recomputed",
    "plain_object",
    "random_streams_kept",
    "rebuild",
    "recomputing",
    "register",
    "seed",
    "uncompiled",
    "unheard",
    "untouched",
    "unwrap",
    "warn",
    "watched",
    "when_reached",
]
