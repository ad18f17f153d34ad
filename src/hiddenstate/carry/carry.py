"""Carry: keeps the state of an unmodified model from one batch to the next."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from ..cells import Handle, has_own_code, layers, listen, unwrap
from ..errors import BadInput, CarryError, CarryWarning, StateMismatch
from ..state import Rows, State, as_table
from .attributes import home
from .carrier import CarryOptions
from .handover import HandOver
from .initial import Init, Start, needed_layers
from .kept import Kept, both_ways, join, part
from .marks import read_marks


class Carry:
    """Hands every recurrent layer of a model the state in which its last call ended.

    The model stays unchanged. A layer that is called without a state gets the carried one, and the state it returns is
    kept, detached. If a call raises, the states from before it are kept.

    >>> model = torch.nn.LSTM(3, 4, batch_first=True)
    >>> x = torch.randn(2, 10, 3)
    >>> whole, _ = model(x)
    >>> with Carry(model):
    ...     first, _ = model(x[:, :6])
    ...     second, _ = model(x[:, 6:])
    >>> torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-6)
    True

    Args:
        model: Any module with recurrent layers in it, also one that is compiled or wrapped in DDP.
        init: What a sequence starts from: `"zeros"` (each layer's own start), an `hs.Learned(model)`, `hs.Noise(std)`,
            or a function from the number of rows to a State.
        rows: What to do with a batch of another size: raise (`"strict"`), or, if it is smaller, run the first rows and
            let the others wait (`"first"`).
        detach: Whether gradients stop between batches.
        override: Whether the carried state also replaces one that the model makes itself in its call: zeros, a learned
            start, the output of an encoder; passed to a layer, or used in a loop of the model's own. A first call, and
            rows that were reset, start as the model does.
        exact: With `override`, whether to refuse a model if two pieces of an input do not give what the whole gives;
            if False, only warn.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Init = "zeros",
        rows: str = "strict",
        detach: bool = True,
        *,
        override: bool = False,
        exact: bool = True,
    ) -> None:
        """Attach to `model`."""
        if rows not in ("strict", "first"):
            raise BadInput(f"rows is {rows!r}, but it is 'strict' (another batch size is an error) or 'first'.")
        if isinstance(model, nn.DataParallel):
            raise CarryError(
                "nn.DataParallel copies the model for every call, so a state kept by one copy is lost to the next. "
                "Use DistributedDataParallel, where each process carries its own rows."
            )
        self._layers = list(layers(model)) if has_own_code(model) else needed_layers(model)
        self._start = Start(init, self._layers)
        options = CarryOptions(rows == "strict", detach, override, exact)
        self._hand_over = HandOver(unwrap(model), self._layers, self._start, options)
        self._hand_over.handles.append(self._attach(unwrap(model)))

    @property
    def state(self) -> State | None:
        """One State for the whole model, with parts named like `encoder.lstm.h`; None before the first batch.

        It may be set to such a State, to None, or, in a model of one layer, to what that layer takes: `h`, `(h, c)`.
        """
        self._hand_over.examination.tell_undecided(self._kept.raw, "in the state")
        states = {layer.name: self._kept.current(layer, self._hand_over.start_of) for layer in self._layers}
        self._start.forget()
        return join(self._layers, {name: state for name, state in states.items() if state is not None})

    @state.setter
    def state(self, state: Any) -> None:
        if state is not None and not isinstance(state, State):
            state = self._named(state)
        raw = self._kept.raw  # attributes that are not known yet to be states
        adopted = self._hand_over.examination.adopted
        own = [layer for layer in self._layers if layer.name not in adopted.layers or not adopted.is_mirror(layer.name)]
        self._kept = Kept() if state is None else Kept(part(own, state), raw=raw)

    def _named(self, native: Any) -> State | None:
        """Return what the only layer itself takes, `h_n` or `(h_n, c_n)`, as a State."""
        if len(self._layers) != 1:
            parts = ", ".join(f"{layer.part(name)!r}: ..." for layer in self._layers for name in layer.spec.parts)
            raise StateMismatch(
                f"carry.state takes a State or None, or of a model with one layer what that layer takes; this is "
                f"{type(native).__name__}, and there are {len(self._layers)} layers: "
                f"hs.State({{{parts}}}, batch_axis=1), or 0 where cells are stepped."
            )
        (layer,) = self._layers
        return join(self._layers, {layer.name: layer.to_state(native)})

    def reset(self, rows: Rows | None = None) -> None:
        """Let all rows, or the rows given by a bool mask or indices, start anew at the next call."""
        if rows is None:
            self._kept = Kept()
            return
        if self._kept.raw:
            names = ", ".join(name for _, name in self._kept.raw)
            raise CarryError(
                f"single rows cannot start anew yet: whether {names}, which the model has kept in its first call, is a "
                f"state is only told by a second one. Call the model once more first, or reset all rows."
            )
        self._kept.check_rows_shared()
        marks = {layer.name: self._kept.mark(layer, rows) for layer in self._layers}  # check all before changing any
        self._hand_over.examination.check_named(rows, self._kept.states.values())
        self._kept.anew.update({name: mask for name, mask in marks.items() if mask is not None})

    def mark(self, *, starts: Tensor | None = None, lengths: Tensor | None = None) -> None:
        """Say for the next call where rows start anew, even in mid-sequence, and how many steps of each row are real.

        Each row keeps the state at its own last step; a row with 0 steps keeps the state it has. Made for `Streams`:

        >>> model = torch.nn.GRU(1, 4, batch_first=True)
        >>> texts = [torch.randn(n, 1) for n in (7, 3, 5, 4)]
        >>> with Carry(model) as carry:
        ...     for chunk in hs.Streams(texts, batch=2, steps=4):
        ...         carry.mark(starts=chunk.starts, lengths=chunk.lengths)
        ...         out, _ = model(chunk.x)

        Args:
            starts: bool `(batch, time)`, True where a row starts anew before that step.
            lengths: `(batch,)`, the number of real steps of each row.
        """
        marks = read_marks(starts, lengths)
        if marks.starts is not None and marks.starts.shape[1]:
            self.reset(marks.starts[:, 0])
        self._hand_over.marks = marks

    def exchange(self, states: Mapping[str, State]) -> dict[str, State]:
        """Replace the kept states by these, one for each layer name, and return the old ones.

        This is for callers with different rows in every call: nothing is checked, joined or copied, and marks are
        dropped.
        """
        before = self._kept
        self._kept = Kept(dict(states))
        self._hand_over.marks = None
        return before.states

    def snapshot(self) -> Kept:
        """Return everything that is kept now, graphs included, for `restore`."""
        return self._kept.copy()

    def restore(self, kept: Kept) -> None:
        """Continue from what `snapshot` returned; this may be repeated."""
        self._kept = kept.copy()

    @contextmanager
    def with_graph(self) -> Iterator[None]:
        """Keep states with their graph inside this context, whatever `detach` is."""
        outer, self._hand_over.detach, self._hand_over.going_back = self._hand_over.detach, False, True
        try:
            yield
        finally:
            self._hand_over.detach, self._hand_over.going_back = outer, False

    @contextmanager
    def fresh(self) -> Iterator[Carry]:
        """Carry a separate state inside this context, from a fresh start; afterwards the old one is back."""
        outer, self._kept = self._kept, Kept()
        try:
            yield self
        finally:
            self._kept = outer

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is kept as plain tensors, for a checkpoint in mid-epoch."""
        adopted = self._hand_over.examination.adopted
        own = adopted.content(self._kept)
        self._hand_over.examination.tell_undecided(self._kept.raw, "in this checkpoint", but=own)
        return {
            "states": {name: dict(state.detach()) for name, state in self._kept.states.items()},
            "axes": {name: dict(state.batch_axis) for name, state in self._kept.states.items()},
            "anew": {name: mask.clone() for name, mask in self._kept.anew.items()},
            "attributes": own,
            "adopted": [name for name in adopted.layers if adopted.is_in(name, own)],
            **_rank(),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        missing = {"states", "axes", "anew"} - set(content)
        if missing:
            raise StateMismatch(f"this is no state_dict of a Carry: it lacks {', '.join(sorted(missing))}.")
        theirs, ours = content.get("rank"), _rank().get("rank")
        if theirs is not None and ours is not None and theirs != ours:
            raise StateMismatch(
                f"this is what rank {theirs} carried, but here is rank {ours}: each rank carries rows of its own. "
                f"torch.distributed.checkpoint keeps one copy of what all ranks name alike: save each rank's "
                f"carry.state_dict() under a name of its own, or in a file of its own."
            )
        adopted, held = self._hand_over.examination.adopted, content.get("attributes", {})
        if held and not adopted.knows(held) and any(bool(mask.any()) for mask in content["anew"].values()):
            raise CarryError(
                f"rows of this checkpoint were to start anew, and the model keeps {', '.join(held)} itself, which no "
                f"call has shown yet. Call it twice with three steps or more of anything, then load it again."
            )
        known = {layer.name: layer for layer in self._layers}
        later = self._hand_over.examination.may_show
        if any(name not in known and not later(name) for name in content["states"]):
            raise StateMismatch(
                f"the checkpoint carries the layers {', '.join(content['states'])}, but this model has "
                f"{', '.join(known)}: it belongs to another model."
            )
        states = {name: State(parts, content["axes"][name]) for name, parts in content["states"].items()}
        for name, state in states.items():
            if name in known:  # otherwise it belongs to a cell that only a call will show
                states[name] = state.to(home(known[name].module)).clone()
                known[name].to_native(states[name])
        anew = {name: mask.clone() for name, mask in content["anew"].items()}
        loaded = frozenset(states) - set(content.get("adopted", ()))
        self._kept = Kept(states, anew, adopted.put_content(held), loaded)

    def close(self) -> None:
        """Detach from the model, and leave it unchanged."""
        self._hand_over.close()
        for module in [module for module, carry in _attached.items() if carry is self]:
            del _attached[module]

    @property
    def init(self) -> Init:
        """What a sequence starts from, as given to the constructor."""
        return self._start.init

    @staticmethod
    def of(model: nn.Module) -> Carry | None:
        """Return the Carry that is attached to `model`, if any."""
        inner = unwrap(model)
        found = (_attached.get(module) for module in (inner, *(layer.module for layer in layers(inner))))
        return next((carry for carry in found if carry is not None), None)

    def __enter__(self) -> Carry:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return the parts that are carried, and for how many rows."""
        names = ", ".join(layer.label for layer in self._layers)
        return f"Carry({names}; {self._rows()})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what is kept of each layer, and which of its rows start anew."""
        told = []
        for layer in self._layers:
            state, anew = self._kept.states.get(layer.name), self._kept.anew.get(layer.name)
            kept = ", ".join(f"{name} {tuple(part.shape)}" for name, part in state.items()) if state else "nothing yet"
            rows = 0 if anew is None else int(anew.sum())
            told.append((layer.label, layer.kind, kept, f"{rows} rows start anew at the next call" if rows else ""))
        return as_table("Carry", self._rows(), told)

    def _rows(self) -> str:
        batches = " and ".join(map(str, dict.fromkeys(state.batch for state in self._kept.states.values())))
        return f"{batches} rows" if batches else "nothing kept yet"

    @property
    def _kept(self) -> Kept:
        return self._hand_over.kept

    @_kept.setter
    def _kept(self, kept: Kept) -> None:
        self._hand_over.kept = kept

    def _attach(self, model: nn.Module) -> Handle:
        found = [layer.name for layer in self._layers if layer.module in _attached]
        taken = [f"the layer {name!r}" if name else "the model itself" for name in found]
        taken += [type(model).__name__] if model in _attached else []
        if taken:
            raise CarryError(
                f"{taken[0]} is carried by another Carry already, and two would overwrite each other. Close it first: "
                f"hs.Carry.of(model).close(), or use `with hs.Carry(model) as carry:`."
            )
        _attached[model] = self
        for layer in self._layers:
            _attached[layer.module] = self
            if both_ways(layer):
                warnings.warn(
                    f"{layer.label!r} runs in both directions: its forward direction is carried, "
                    f"its reverse direction starts anew in every batch, since it begins at the batch's end.",
                    CarryWarning,
                    stacklevel=3,
                )
        return listen(model, self._layers, self._hand_over)


_attached: WeakKeyDictionary[nn.Module, Carry] = WeakKeyDictionary()


def _rank() -> dict[str, int]:
    """Return this process's rank and the number of ranks, if there are several."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return {"rank": dist.get_rank()} if several else {}
