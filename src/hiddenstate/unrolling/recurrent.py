"""`Recurrent`: any cell with the shape of call and return that `nn.LSTM` has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .._compiling import compiling
from ..cells import Adapter, Layer, Spec, as_layer, flatten, rebuild, register, uncompiled
from ..errors import BadInput, StateMismatch
from ..state import State
from .checks import Lengths, Task, read
from .engines import Engine, check_engine, chosen_engine, layer_for, run_cell
from .one_step import is_single, known_form, remember_step, step_again
from .stacking import run_stack, stacked
from .waiting import run_others


class Recurrent(nn.Module):
    """Layers and directions of any cell, called like `nn.LSTM`; batch-first unless told otherwise.

    >>> stack = Recurrent(torch.nn.LSTMCell, 3, 8, num_layers=2, bidirectional=True)
    >>> out, (h, c) = stack(torch.randn(5, 7, 3))
    >>> out.shape, h.shape
    (torch.Size([5, 7, 16]), torch.Size([4, 5, 8]))

    Its cells are `l0`, `l0_reverse`, `l1`, … . A cell whose output is not as wide as its `hidden_size` says so
    with an attribute `output_size`; one that returns its state alone gives its part `h` as output.
    """

    engine: Engine = "auto"  # of those that were pickled before there was a choice

    def __new__(cls, *args: Any, **kwargs: Any) -> Recurrent:
        """Refuse a cell that is made already, with or without the sizes, before Python misses them."""
        given = args[0] if args else kwargs.get("CellType")
        if isinstance(given, nn.Module):
            name = type(given).__name__
            raise BadInput(
                f"a {name} that is made already was given, but each layer and direction has a cell of its own: give "
                f"the class, hs.Recurrent({name}, input_size, hidden_size). hs.unroll(cell, x) runs the one you have."
            )
        return super().__new__(cls)

    def __init__(
        self,
        CellType: Callable[..., nn.Module],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        *,
        batch_first: bool = True,
        engine: Engine = "auto",
        **cell_kwargs: Any,
    ) -> None:
        """Make `CellType(input_size, hidden_size, **cell_kwargs)` for each layer and direction.

        With `batch_first=False` inputs and outputs are `(time, batch, feature)`, as in torch's own layers. `engine`
        is how its cells run where a call does not say otherwise, as in `unroll`.
        """
        super().__init__()
        _check_settings(num_layers, dropout)
        check_engine(engine)
        self.engine = engine
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.bidirectional, self.dropout = num_layers, bidirectional, float(dropout)
        self.batch_first = batch_first
        width = input_size
        for depth in range(num_layers):
            made = [CellType(width, hidden_size, **cell_kwargs) for _ in self._ends]
            for end, cell in zip(self._ends, made, strict=True):
                self.add_module(f"l{depth}{end}", cell)
            width = sum(int(getattr(cell, "output_size", hidden_size)) for cell in made)
        self.output_size = width

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Any = None,
        *,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
        engine: Engine | None = None,
    ) -> tuple[Any, Any]:
        """Return the last layer's outputs, and the final states of all in the cell's own form.

        Args:
            x: `(batch, time, feature)` (`(time, batch, feature)` with `batch_first=False`), or `(time, feature)`, or
                packed; outputs come back likewise.
            state: The first states, each part `(num_layers * directions, batch, unit)` in the cell's own nesting, or
                a State. None: each cell's initial state.
            lengths: As in `unroll`.
            resets: As in `unroll`.
            engine: As in `unroll`. None: the one that it was made with.
        """
        if compiling():
            from .in_graph import stay_outside  # which a plain import can do without

            found = self._in_graph(x, state, lengths=lengths, resets=resets, engine=engine)
            if not isinstance(found, str):
                return found
            stay_outside(found)
        return self._forward(x, state, lengths=lengths, resets=resets, engine=engine)

    @uncompiled
    def _forward(
        self, x: Any, state: Any, *, lengths: Lengths | None, resets: Tensor | None, engine: Engine | None
    ) -> tuple[Any, Any]:
        engine = chosen_engine(engine, self.engine)
        if isinstance(x, PackedSequence):
            if lengths is not None:
                raise BadInput("x is a PackedSequence, which has its lengths in it: leave lengths out.")
            return self._forward_packed(x, state, resets=resets, engine=engine)
        if lengths is None and resets is None and engine != "fast" and (again := self._step_again(x, state, engine)):
            return again
        layer = as_layer(self)
        single = isinstance(x, Tensor) and x.dim() == self.unbatched_axes(x)
        if single:
            x = x.unsqueeze(0)
            resets = resets.unsqueeze(0) if isinstance(resets, Tensor) and resets.dim() == 1 else resets
        turned = not (single or self.batch_first) and isinstance(x, Tensor) and x.dim() > 1
        x = x.transpose(0, 1) if turned else x
        layer_for(self.cells()[0], x)
        task = read(layer, x, state, lengths=lengths, resets=resets)
        out, final = run_others(task, lambda some: self._run(some, engine), layer.initial)
        out = out.transpose(0, 1) if turned else out
        return (out.squeeze(0) if single else out), layer.to_native(final, batched=not single)

    def _in_graph(
        self, x: Any, state: Any, *, lengths: Any, resets: Any, engine: Engine | None
    ) -> tuple[Tensor, Any] | str:
        """Run a call as one operator of the graph that is being compiled, or say why it stays outside."""
        from .in_graph import nested, nesting, run_in_graph

        if not isinstance(x, Tensor) or x.dim() != self.unbatched_axes(x) + 1:
            return "x is packed, or has no rows"
        if not torch.compiler.is_dynamo_compiling() and chosen_engine(engine, self.engine) == "loop":
            return "the loop writes all steps out"
        found = run_in_graph(
            self,
            x,
            state,
            lengths=lengths,
            resets=resets,
            runner=_run_named,
            rows=0 if self.batch_first else 1,
            options=(("engine", engine),),
        )
        if isinstance(found, str):
            return found
        form = nesting(self, _form)
        if not form:
            return "its cells' state is nested in a type of its own"
        out, final = found
        return out, nested([*form.split("\n")], final)

    def cells(self) -> tuple[nn.Module, ...]:
        """Return the cells, layer by layer, the forward direction before the reverse."""
        return tuple(self._modules[f"l{depth}{end}"] for depth in range(self.num_layers) for end in self._ends)  # type: ignore[misc]

    def unbatched_axes(self, x: Tensor) -> int:
        """Return how many axes an input like `x` has when it has no rows."""
        return 2 if x.is_floating_point() or x.is_complex() else 1

    def __prepare_scriptable__(self) -> Any:
        """Refuse: what runs a cell along time is Python, which TorchScript does not know."""
        raise BadInput(
            "a Recurrent cannot be scripted: TorchScript does not know the Python that runs a cell along time. "
            "torch.jit.trace follows its steps for one length; torch.compile and torch.export take it as one operator."
        )

    def extra_repr(self) -> str:
        """Return the settings, as `nn.LSTM` shows them."""
        shown = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        shown += f", dropout={self.dropout}" if self.dropout else ""
        shown += ", bidirectional=True" if self.bidirectional else ""
        shown += "" if self.engine == "auto" else f", engine={self.engine!r}"
        return shown + ("" if self.batch_first else ", batch_first=False")

    @property
    def _ends(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _step_again(self, x: Any, state: Any, engine: Engine) -> tuple[Any, Any] | None:
        """Run one step whose first cell was stepped like this before; None for any other call."""
        x = x if self.batch_first or not isinstance(x, Tensor) or x.dim() < 2 else x.transpose(0, 1)
        if not is_single(x) or x.dim() != self.unbatched_axes(x) + 1:
            return None
        cells = self.cells()
        form = known_form(cells[0], x)
        parts = None if form is None or state is None else form.stack(state, len(cells), x.shape[0])
        if form is None or (parts is None and state is not None):
            return None
        if len(cells) == 1:
            first = None if parts is None else State.alike({name: part[0] for name, part in parts.items()}, form.axes)
            again = step_again(cells[0], x, first, timed=engine == "auto", form=form)
            if again is None:
                return None
            out, last = again
            final = stacked([last])
        else:
            axes = {name: axis + 1 for name, axis in form.axes.items()}
            out, final = self._run(Task(x, None if parts is None else State.alike(parts, axes)), engine)
        return (out if self.batch_first else out.transpose(0, 1)), form.build(final)

    def _run(self, task: Task, engine: Engine) -> tuple[Tensor, State]:
        dropout = self.dropout if self.training else 0.0
        return run_stack(
            self.cells(),
            task,
            lambda cell, piece: _run_piece(cell, piece, engine),
            directions=len(self._ends),
            dropout=dropout,
        )

    def _forward_packed(self, x: PackedSequence, state: Any, **options: Any) -> tuple[PackedSequence, Any]:
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        given = padded if self.batch_first else padded.transpose(0, 1)
        out, after = self._forward(given, state, lengths=lengths, **options)
        out = out if self.batch_first else out.transpose(0, 1)
        if x.sorted_indices is not None:
            out, lengths = out.index_select(0, x.sorted_indices), lengths[x.sorted_indices.cpu()]
        data = pack_padded_sequence(out, lengths, batch_first=True).data
        return PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices), after


class RecurrentAdapter(Adapter):
    """Finds a `Recurrent` in any model, with one track for each of its cells."""

    kind = "recurrent"
    fused = True

    def spec(self, module: nn.Module) -> Spec:
        """Read the spec off the stack's settings and its first cell."""
        stack = _stack_of(module)
        cell = _first(stack).spec
        directions = 2 if stack.bidirectional else 1
        return Spec(cell.parts, cell.sizes, stack.num_layers, directions, 0, stack.input_size, stack.batch_first)

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return all cells' initial states, stacked."""
        return stacked([as_layer(cell).initial(batch) for cell in _stack_of(module).cells()])

    def to_state(self, module: nn.Module, native: Any, *, batch: int | None = None) -> State:
        """Name the parts as the cell does; a state without rows becomes one of a single row."""
        parts, _ = flatten(native)
        own = _first(_stack_of(module)).initial(1)
        if set(parts) != set(own):
            raise StateMismatch(
                f"the state has the parts {', '.join(parts)}, but this Recurrent's cells have {', '.join(own)}: "
                f"it is nested as its cells' own state is, each part with one axis more in front."
            )
        axes = {name: axis + 1 for name, axis in own.batch_axis.items()}
        rows = {n: p if p.dim() > own[n].dim() else p.unsqueeze(axes[n]) for n, p in parts.items()}
        return State(rows, axes)

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Any:
        """Return the cell's own nesting."""
        stack = _stack_of(module)
        first = _first(stack)
        own = first.initial(1)
        _check(state, own, len(stack.cells()))
        parts = dict(state)
        if not batched:
            if state.batch != 1:
                raise StateMismatch(f"the input has no batch axis, so it is one row, but the state has {state.batch}.")
            parts = {name: part.squeeze(state.batch_axis[name]) for name, part in parts.items()}
        return rebuild(flatten(first.to_native(own))[1], parts)

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Any]:
        """Part outputs and final state."""
        output, native = result
        return output, native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Count rows; a sequence without them is one."""
        x = args[0] if args else kwargs["x"]
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), True
        stack = _stack_of(module)
        return (1, False) if x.dim() == stack.unbatched_axes(x) else (x.shape[0 if stack.batch_first else 1], True)


register(Recurrent, RecurrentAdapter())


def _check_settings(num_layers: int, dropout: float) -> None:
    if num_layers < 1:
        raise BadInput(f"num_layers is {num_layers}, but at least one layer is needed.")
    if not 0 <= dropout <= 1:
        raise BadInput(f"dropout is {dropout}, but a probability from 0 to 1 is needed.")
    if dropout and num_layers == 1:
        warnings.warn(
            f"dropout={dropout} is put between layers, and with num_layers=1 there is no place between them: "
            f"it does nothing. Put an nn.Dropout after the layer, or use more layers.",
            stacklevel=3,
        )


def _stack_of(module: nn.Module) -> Recurrent:
    assert isinstance(module, Recurrent)  # the adapter is registered for no other type
    return module


def _run_piece(cell: nn.Module, piece: Task, engine: Engine) -> tuple[Tensor, State]:
    single = piece.plain and piece.initial is None and is_single(piece.x)
    again = step_again(cell, piece.x, piece.state, timed=engine == "auto") if single and engine != "fast" else None
    if again is not None:
        return again
    layer = layer_for(cell, piece.x)
    out, after = run_cell(layer, piece, engine)
    if single and layer.module is cell:
        remember_step(layer, piece.x, after)
    return out, after


def _run_named(stack: Recurrent, x: Tensor, state: State | None, **options: Any) -> tuple[Tensor, State]:
    out, native = stack._forward(x, state, **options)
    return out, as_layer(stack).to_state(native, batch=x.shape[0 if stack.batch_first else 1])


def _form(stack: nn.Module) -> Any:
    """Return how the state of a stack's cells is nested."""
    first = _first(_stack_of(stack))
    return flatten(first.to_native(first.initial(1)))[1]


def _first(stack: Recurrent) -> Layer:
    return as_layer(stack.cells()[0])


def _check(state: State, own: State, deep: int) -> None:
    if set(state) != set(own):
        raise StateMismatch(
            f"the state has the parts {', '.join(state)}, but this Recurrent's cells have {', '.join(own)}."
        )
    for name, part in state.items():
        axis = own.batch_axis[name]
        shape = [deep, *own[name].shape]
        shape[axis + 1] = state.batch
        if state.batch_axis[name] != axis + 1 or list(part.shape) != shape:
            raise StateMismatch(
                f"part {name!r} has shape {tuple(part.shape)} with its batch axis at {state.batch_axis[name]}, but "
                f"this Recurrent needs {tuple(shape)} with the batch axis at {axis + 1}: {deep} cells in front."
            )
