"""The toolkit for the hidden state of recurrent models in PyTorch.

    State, load          what a state is: named tensors at one instant, saved without pickle
    layers, register     who makes the next one: recurrent layers found in any model; Cell is the type of one's own
    unroll, Recurrent    how a cell is run along time; accelerate runs torch's own layers faster; also explain
    Carry, Learned, …    how a state goes from batch to batch: also Noise, Bridge, tbptt, Streams, check_split
    record, tap, …       seeing a run without changing it: every state and gate; also load_recording, Trajectory
    measure              numbers: saturation, memory, Jacobians, exponents, fixed points, what states know
    regularize           penalties on how states move, for any training loop; dropout made for recurrence
    diagnose, Monitor    verdicts: what is wrong, how we know, what to do; now, or while training
    pool                 heads over states in between: Last, Mean, Max, Attention, Taps, …
    plot                 pictures of all of it, each into one `ax` of matplotlib
    serve                one state for each caller, batched and durable: an engine, a server, a client
    report               one page with all of it
    testing              what the library relies on, as checks of your own cells, adapters, stores and rules
    errors               every exception and warning, drawn as a tree

Read on in any part's own docstring: `help(hs.errors)`, `help(hs.State)`.
"""

from typing import TYPE_CHECKING

from . import _torch_names, errors, measure, pool, regularize
from .carry import Bridge, Carry, Learned, Noise, Streams, check_split, tbptt
from .cells import Cell, layers, register
from .recording import Trajectory, load_recording, record, tap
from .state import State, load
from .unrolling import Recurrent, accelerate, explain, unroll

__version__ = "0.2.0"

__all__ = [
    "Bridge",
    "Carry",
    "Cell",
    "Learned",
    "Monitor",
    "Noise",
    "Recurrent",
    "State",
    "Streams",
    "Trajectory",
    "accelerate",
    "check_split",
    "diagnose",
    "errors",
    "explain",
    "layers",
    "load",
    "load_recording",
    "measure",
    "plot",
    "pool",
    "record",
    "register",
    "regularize",
    "report",
    "serve",
    "tap",
    "tbptt",
    "testing",
    "unroll",
]

# What loads on first use, because it brings a plotting library, a web stack or much code of our own:
# name -> "module" or "module:attribute".
# A name here has its twin under TYPE_CHECKING, so that editors and mypy see it.
_LAZY: dict[str, str] = {
    "Monitor": "hiddenstate.diagnosis:Monitor",
    "diagnose": "hiddenstate.diagnosis:diagnose",
    "plot": "hiddenstate.plot",
    "report": "hiddenstate.reporting:report",
    "serve": "hiddenstate.serve",
    "testing": "hiddenstate.testing",
}

if TYPE_CHECKING:
    from . import plot as plot
    from . import serve as serve
    from . import testing as testing
    from .diagnosis import Monitor as Monitor
    from .diagnosis import diagnose as diagnose
    from .reporting import report as report

if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        """Load `hs.plot` and its like when somebody first asks for them."""
        if name not in _LAZY:
            raise AttributeError(f"module 'hiddenstate' has no attribute {name!r}")
        from importlib import import_module

        module, _, attribute = _LAZY[name].partition(":")
        _torch_names.require(module.rpartition(".")[2])
        value = import_module(module)
        if attribute:
            value = getattr(value, attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
