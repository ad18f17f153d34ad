"""Recurrent layers and cells: finding them in any model, and hearing their calls."""

from typing import TYPE_CHECKING

from .._compiling import may_be_recomputed, recomputing, under_checkpointing
from .axes import InputAxes, input_axes, is_step, layer_axes, rows_beside_steps
from .batches import BegunDataSet, ReadBatch, as_tensors, is_data_set, read_batch
from .cell import Cell
from .custom import CellAdapter
from .discovery import (
    Layers,
    ambiguous,
    as_layer,
    cell_along,
    gathered,
    has_own_code,
    is_around_cells,
    layers,
    register,
    registrations,
)
from .dynamo import eager, uncompiled
from .given_call import (
    Called,
    Calling,
    GivenCall,
    called,
    calling,
    given_call,
    is_mask,
    refuse_clashes,
    sequence_among,
    taken_by_position,
)
from .handed_on import EndState, memory_of
from .layer import Adapter, Call, Layer, Spec
from .listener import (
    Handle,
    LetsPass,
    Listener,
    OuterCall,
    Proceed,
    Rank,
    around,
    attributes,
    listen,
    listeners,
    tells_now,
    unheard,
    watchers,
    watching,
)
from .native import Form, flatten, rebuild
from .returned import state_before_output
from .signature import Arguments, state_first
from .snapshot import (
    Snapshot,
    is_sharded,
    plain_object,
    put_random_streams,
    random_streams,
    random_streams_kept,
    seed,
    untouched,
)
from .started import StartedModel, needed_states, started
from .succession import OpenRun, Succession
from .torch_layers import TorchCellAdapter
from .trials import invented_inputs
from .warning import warn
from .watched_calls import Begun, foreseen, watched, watched_from, when_reached
from .weights import weights_like
from .wrappers import unwrap, unwrap_to_call

if TYPE_CHECKING:
    from .behavior import LoopStart as LoopStart
    from .behavior import OwnStart as OwnStart
    from .behavior import Part as Part

__all__ = [
    "Adapter",
    "Arguments",
    "Begun",
    "BegunDataSet",
    "Call",
    "Called",
    "Calling",
    "Cell",
    "CellAdapter",
    "EndState",
    "Form",
    "GivenCall",
    "Handle",
    "InputAxes",
    "Layer",
    "Layers",
    "LetsPass",
    "Listener",
    "OpenRun",
    "OuterCall",
    "Proceed",
    "Rank",
    "ReadBatch",
    "Snapshot",
    "Spec",
    "StartedModel",
    "Succession",
    "TorchCellAdapter",
    "ambiguous",
    "around",
    "as_layer",
    "as_tensors",
    "attributes",
    "called",
    "calling",
    "cell_along",
    "eager",
    "flatten",
    "foreseen",
    "gathered",
    "given_call",
    "has_own_code",
    "input_axes",
    "invented_inputs",
    "is_around_cells",
    "is_data_set",
    "is_mask",
    "is_sharded",
    "is_step",
    "layer_axes",
    "layers",
    "listen",
    "listeners",
    "may_be_recomputed",
    "memory_of",
    "needed_states",
    "plain_object",
    "put_random_streams",
    "random_streams",
    "random_streams_kept",
    "read_batch",
    "rebuild",
    "recomputing",
    "refuse_clashes",
    "register",
    "registrations",
    "rows_beside_steps",
    "seed",
    "sequence_among",
    "started",
    "state_before_output",
    "state_first",
    "taken_by_position",
    "tells_now",
    "uncompiled",
    "under_checkpointing",
    "unheard",
    "untouched",
    "unwrap",
    "unwrap_to_call",
    "warn",
    "watched",
    "watched_from",
    "watchers",
    "watching",
    "weights_like",
    "when_reached",
]
