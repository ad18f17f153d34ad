"""Finding out what recurs in a model besides its known layers: in the user's calls, with a choice and a proof."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import (
    Arguments,
    Handle,
    Layer,
    Layers,
    OuterCall,
    ambiguous,
    around,
    foreseen,
    has_own_code,
    listen,
    warn,
    watched,
    when_reached,
)
from ..errors import CarryError, CarryWarning, StateMismatch
from ..state import Rows, State, tensors
from .adopted import AdoptedAttributes
from .attributes import Attribute
from .carrier import Carrier, CarryOptions
from .choice import Choice
from .initial import not_recurrent
from .loops import Loops
from .pieces import Inputs, PiecesAndWhole
from .proof import Proof, not_called, not_theirs, read_too
from .ways import CallWay, KnownWays

_SEEN = re.compile(r"(^|\.)(loop|layer|attribute|cell|cache)\d+_*$")  # names of layers found by their behavior
_LOOKS = 3  # calls to watch at most, if they are too short to decide


class Examination:
    """Watches calls of a model until it is known what recurs in it, and decides what of that is carried."""

    def __init__(self, model: nn.Module, found: list[Layer], options: CarryOptions, carrier: Carrier) -> None:
        """Begin with the known layers of `model`; the list `found` is changed in place as calls show more."""
        self.loops, self.adopted = Loops(model), AdoptedAttributes(model)
        self.handed_in: frozenset[str] = frozenset()  # layers whose first state comes with the call of the model
        self.made_of_input: frozenset[str] = frozenset()  # layers whose first state is made from the model's input
        self.handles: list[Handle] = []  # of listeners added later
        self.undecided: list[str] = []  # what the last watched call was too short to decide
        self.open = True  # whether a call needs more than handing layers their states
        self._model, self._layers, self._options, self._carrier = model, found, options, carrier
        # How many more calls may be watched, since a short one may not decide.
        self._own_code = has_own_code(model)
        self._looks = _LOOKS if self._own_code else 0
        self._told: set[str] = set()
        self._heard = [*found]
        self._seats: dict[nn.Module, Handle] = {}  # of cells that calls have shown
        self._silent: set[str] | None = {layer.name for layer in found}  # never called so far; None: already reported
        self._examined: frozenset[str] = frozenset()  # lines of loops that calls have decided
        self._proven: set[str] = set()  # layers for which pieces were seen to give the whole
        self._tries = 0  # calls in which this could not be tried
        self._times: tuple[tuple[Any, int], ...] = ()  # axes of the model's inputs that are time
        self._rows: list[tuple[Any, int]] | None = None  # axes of the inputs that counted rows in every call
        self._not_of_call: int | None = None  # the number of rows of a call, if the states have another
        self._unproven: tuple[Layers, Choice] | None = None  # the choice, until pieces were seen to give the whole
        self._cells = True  # whether states go to cells, and not to the loops that they are in
        self._ways = KnownWays(model)
        self._tried: list[CallWay] = []  # the ways of our own trial calls
        self._held = False  # whether pieces were seen to give what the whole gives
        kept = self.adopted
        self._proof = Proof(model, options, carrier, kept.undone, lambda: kept.layers, self.tell, lambda: self._held)

    @property
    def goes_on(self) -> bool:
        """Whether a call may still show more recurrence."""
        return self._looks > 0

    def may_show(self, name: str) -> bool:
        """Say whether a call may yet show a layer with this name."""
        return self.goes_on and (bool(_SEEN.search(name)) or name in dict(self._model.named_modules()))

    def around(
        self, entry: OuterCall, run: Callable[[], Any], *, ahead: bool, loaded: Mapping[str, Set[str]]
    ) -> Callable[[], Any]:
        """Return a function that makes a call and watches it. If the call must be known `ahead`, we make one first.

        That is also done if only a call shows which of two modules is the cell. The layers `loaded` from a checkpoint
        show whether its states belong to loops or to the cells in them.
        """
        if not self._looks or entry.module is not self._model or self.loops:
            return run
        if not ahead and not ambiguous(self._model):
            return partial(watched, entry, run, self._examine)
        with torch.no_grad():
            found = foreseen(entry)
        if found is not None and found.without_cells is not None and _missing(loaded, found):
            others = found.without_cells()
            found = found if _missing(loaded, others) else others
        if found is not None:
            self._examine(found)
        return run

    def check_loaded(self, loaded: Mapping[str, Set[str]]) -> None:
        """Raise if a checkpoint has states for layers, given with their parts, that no call has shown."""
        names = [layer.name for layer in self._layers]
        unknown = ", ".join(_missing(loaded, self._layers))
        if unknown:
            self.refuse_short(f"the state that was loaded has the layers {unknown}, which", "load it again")
            raise StateMismatch(
                f"the state that was loaded has the layers {unknown}, but this call shows "
                f"{', '.join(names) or 'none'}: it belongs to another model, or to another version of its code, or the "
                f"call is too short to show it."
            )

    def again(self, found: Layers) -> None:
        """Use what a second call shows of a model whose loops are known: the state that it keeps itself."""
        self._looks = 0 if found.decided else self._looks - 1
        kept = self.adopted.take(found)
        self._layers[:] = [*(layer for layer in self._layers if layer.kind != "attribute"), *kept]
        self._tell_counters()

    def _tell_counters(self) -> None:
        """Warn of plain numbers that keep counting beside a state that the model keeps."""
        if self.adopted.layers:
            self.tell(
                "not carried, and not put back by a reset: ", [f"{each}, a number" for each in self.adopted.counters()]
            )

    def rows_of(self, inputs: Inputs) -> int | None:
        """Return the number of rows in a call of the model, if an axis of its inputs was seen to count them."""
        found = tensors(inputs)
        axes = [(path, axis) for path, axis in self._rows or () if path in found and found[path].dim() > axis]
        sizes = {found[path].shape[axis] for path, axis in axes}
        return sizes.pop() if len(sizes) == 1 else None

    def learn_rows(self, inputs: Inputs, rows: int) -> None:
        """Find which axes of the inputs are as long as the states have rows, among the first two axes without time.

        If steps are read along one axis, rows are counted along the first of the others.
        """
        times, sizes = dict(self._times), []
        for path, x in tensors(inputs).items():
            axes = (0, 1) if path not in times else (1,) if times[path] == 0 else (0,)
            sizes += [(path, axis, x.shape[axis]) for axis in axes if axis < x.dim()]
        same = [(path, axis) for path, axis, size in sizes if size == rows]
        self._rows = same if self._rows is None else [each for each in self._rows if each in same]
        rank = {path: x.dim() for path, x in tensors(inputs).items()}  # (time, unit) may have no rows
        others = {size for path, axis, size in sizes if path in times and rank[path] > 2 * axis}
        self._not_of_call = next(iter(others)) if others and not same else None

    def check_named(self, rows: Rows, states: Iterable[State]) -> None:
        """Raise for row indices if the states have other rows than the call, such as samples times nodes."""
        batches = {state.batch for state in states} if self._not_of_call is not None else set()
        if batches and (isinstance(rows, slice) or torch.as_tensor(rows).dtype is not torch.bool):
            raise CarryError(
                f"carry.reset was told the rows {rows}, but what is carried has {batches.pop()} rows, and the call's "
                f"input has {self._not_of_call}: the model folds other axes into the rows (samples times nodes, say), "
                f"and which of them are meant is not known. Give a bool mask with one entry for each row of "
                f"carry.state, or reset all rows: carry.reset()."
            )

    def tell(self, what: str, things: list[str]) -> None:
        """Warn of things that were not warned of before."""
        new = [each for each in things if each not in self._told]
        self._told.update(new)
        if new:
            warn(f"{what}{'; '.join(new)}. hs.layers(model, *inputs).explain() says more.", CarryWarning)

    def tell_undecided(self, held: Iterable[Attribute], where: str, but: Container[str] = ()) -> None:
        """Warn that possible states, except those in `but`, are not included until a second call has decided."""
        raw = [name for module, name in held if self.adopted.label(module, name) not in but]
        self.tell(f"not {where}: ", [f"{name}, of which a second call tells whether it is a state" for name in raw])

    def report_silent(self, entry: nn.Module, called: set[str]) -> None:
        """Warn once of layers that the first call of the whole model did not reach."""
        self.open = self.goes_on or bool(self.loops or self.adopted.layers or self.adopted.maybe)
        if self._silent is None:
            return
        self._silent -= called
        if self._silent and entry is self._model:
            names = ", ".join(repr(name) for name in sorted(self._silent))
            warn(
                f"{names} {'was' if len(self._silent) == 1 else 'were'} found in the model, but not called in its "
                f"first call, so nothing is carried there. Usually this call takes another way through the model; "
                f"a layer whose weights are used without calling it is not heard.",
                CarryWarning,
            )
        if not self._silent or entry is self._model:
            self._silent = None
        self.open |= self._silent is not None

    def _examine(self, found: Layers) -> None:
        """Carry what a call has shown to recur, or warn that it is not carried."""
        self._looks = 0 if found.decided else self._looks - 1
        self._examined |= found.seen.examined if found.seen is not None else frozenset()
        self.undecided = found.undecided(self._examined)
        if not found and not found.doubts() and found.decided:
            raise not_recurrent(self._model)
        final = not self._looks or not (found.seen and found.seen.later)
        choice = self._choose(found, final=final)
        names = {layer.name for layer in (*choice.stays, *choice.new)}
        self._silent = None if self._silent is None else (self._silent & names) | {each.name for each in choice.new}
        self._hear(choice.new)
        self.handles += when_reached(self._model, found, self._on_reached)
        for loop in choice.loops:
            if loop.module is not self._model:
                self.handles.append(around(loop.module, partial(self._by_itself, loop)))
        names = {layer.name for layer in (*choice.stays, *choice.new, *choice.loops)}
        again = self._unproven is not None or self._tries > 0
        if self._options.override and (again or not (names and names <= self._proven)):
            self._unproven, self._proven = (found, choice), names
        if self._unproven is None:
            self._tell(found, choice)

    def _hear(self, new: list[Layer]) -> None:
        """Listen to layers that a call has shown, in their latest form."""
        for layer in new:
            if layer not in self._heard:
                before = self._seats.pop(layer.module, None)
                self._seats[layer.module] = listen(self._model, [layer], self._carrier)
                self._heard = [*(each for each in self._heard if each.module is not layer.module), layer]
                self.handles.append(self._seats[layer.module])
                if before is not None:
                    before.remove()

    def _tell(self, found: Layers, choice: Choice) -> None:
        """Warn of what is not carried, and of what is carried although pieces do not give what the whole gives."""
        short = set(found.undecided())
        self.tell("not carried: ", [each for each in choice.left if each not in short])
        self.tell("not known to be carried: ", self.undecided)
        self._tell_counters()
        uneven = choice.uneven
        carried = (choice.stays or choice.new) and not (uneven or self._options.override or self.adopted.counts())
        if carried and found.mixing is not None:  # with `override`, pieces are tried
            uneven = [str(each) for each in found.mixing()]
        self.tell("carried, but pieces do not give what the whole gives: ", uneven)

    def _choose(self, found: Layers, *, final: bool) -> Choice:
        """Decide what to carry after a call, and begin with the states that it ended in."""
        kept = self.adopted.take(found)
        anew = [layer for layer in found if layer.name in self.adopted.begun_anew]
        choice = Choice.of(found, self._layers, [*kept, *anew], final=final, override=self._options.override)
        choice = replace(choice, left=[*choice.left, *self.adopted.begun_anew.values()])
        self.handed_in = found.seen.handed_in if found.seen is not None else frozenset()
        self.made_of_input = found.seen.made_of_input if found.seen is not None else frozenset()
        self._times = (found.seen.times if found.seen is not None else ()) or self._times
        self._layers[:] = [*choice.stays, *choice.new, *choice.loops, *kept]
        self.loops.take(found, choice.loops)
        for layer in (*choice.new, *choice.loops):
            self._carrier.begin_with(layer, found.live(layer))
        return choice

    def _by_itself(self, loop: Layer, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
        """Warn that a loop is run in a call of a part of the model, in which it is not carried."""
        if not self._carrier.running and self.loops:
            self.tell("not carried in calls of a part of the model by itself: ", [loop.label])
        return run(arguments)

    def _on_reached(self, name: str) -> None:
        """Warn that a call reaches a module that no watched call has reached, and watch the next one."""
        if not self._looks and name not in self._told:
            self._looks, self.open = 1, True
            self._told.add(name)
            warn(
                f"not carried: what {name!r} may keep, which no call reached before; the next call is watched for it.",
                CarryWarning,
            )

    # -- whether pieces give what the whole gives ----------------------------------------------------------------------

    def new_way(self, entry: OuterCall) -> CallWay | None:
        """Return an object that notes the way of a call; None if ways do not matter."""
        return self._ways.new() if self._options.override and self._own_code and entry.module is self._model else None

    def trial_way(self) -> CallWay:
        """Return an object that notes the way of a trial call: if the trial succeeds, its way becomes known."""
        self._tried.append(self._ways.new())
        return self._tried[-1]

    def _learn(self, way: CallWay | None) -> None:
        """Learn the way of a call, and the ways of the trial calls that proved it."""
        for each in (way, *self._tried):
            self._ways.learn(each, like=way)
        self._tried = []

    def prove(self, entry: OuterCall, way: CallWay | None, replaced: Collection[str], kept: Collection[str]) -> None:
        """Try whether pieces of a call's input, with the state handed over, give what the whole gives; raise if not.

        Once this was seen, it holds for calls that take the same way. `replaced` are the layers that got the carried
        state in this call, `kept` the layers whose state is kept.
        """
        if entry.module is not self._model or not self._options.override:
            return
        if unused := self._ways.unused(way, kept):
            raise not_called(unused[0])
        if self._unproven is None:
            news = self._ways.news(way) if replaced and self._own_code else ""
            if news and way is not None and (lines := self._ways.reading(way, replaced)):
                raise read_too(self._model, lines, replaced)
            if news:
                self._tried = []
                self._proof.again(entry, news, self._layers, replaced, cells=self._cells, times=self._times)
                self._learn(way)
            return
        found, choice = self._unproven
        self.refuse_short(f"what is to be carried in {type(self._model).__name__}", "carry.reset()")
        outcome = self._outcome(entry, found, choice)
        tied = found.seen.entangled if found.seen is not None else ()
        if tied and (outcome.holds or not outcome.tried):  # for this input, or for all inputs that could be tried
            outcome = replace(outcome, tried=False, refused=True, why_not=not_theirs(self._model, tied))
        if not outcome.holds:
            others = self._without_cells(entry, found)
            if isinstance(others, str):
                outcome = replace(outcome, why_not=outcome.why_not or others)
            elif others is not None:
                found, choice, outcome = others
        self._unproven = found, choice
        self._tell(found, choice)
        if not outcome.tried and not outcome.refused and (layer := self._carrier.called_anew()):
            self._looks = _LOOKS
            raise CarryError(
                f"the layer {layer!r} is called several times in one call of the model, from starts of its own, and "
                f"which of them goes on from the carried state was not seen: {outcome.why_not}."
            )
        self._proof.judge(outcome, found, choice)
        self._unproven, self._held = None, outcome.holds  # if a call is refused, the next one is tried
        self._cells = found.seen is None or found.seen.cells
        self._learn(way)
        if not outcome.tried and not self._times and self._tries < _LOOKS:
            self._tries, self._looks = self._tries + 1, max(1, self._looks)  # a longer call may decide

    def _outcome(self, entry: OuterCall, found: Layers, choice: Choice) -> PiecesAndWhole:
        """Try the choice; a loop whose state the model itself continues is left to the model."""
        if not self._layers and (self.adopted.begun_anew or not self._looks):
            why = (
                f"nothing of {type(self._model).__name__} can be carried, although override=True: "
                f"{'; '.join(choice.left)}. hs.layers(model, *inputs).explain() says more."
            )
            return PiecesAndWhole(False, why_not=why, refused=True)
        if all(layer.name in self.adopted.layers for layer in self._layers):
            return PiecesAndWhole(True)  # no start was replaced
        outcome = self._compared(entry, found)
        kept = [loop for loop in choice.loops if self.adopted.holding(_last(found, loop))]
        if not outcome.holds and kept:  # the model itself continues from the end of its loop
            self._layers[:] = [layer for layer in self._layers if layer not in kept]
            self.loops.take(found, [loop for loop in choice.loops if loop not in kept])
            for loop in kept:
                self._carrier.give_up(loop)
            outcome = self._compared(entry, found)
        return outcome

    def _compared(self, entry: OuterCall, found: Layers) -> PiecesAndWhole:
        self._tried = []  # a failed trial teaches no ways
        return self._proof.compared(entry, found)

    def _without_cells(self, entry: OuterCall, found: Layers) -> tuple[Layers, Choice, PiecesAndWhole] | str | None:
        """Carry the states of loops at their starts, instead of the states of the cells in them, if the proof succeeds.

        This is for cells whose output is also read by something else (attention), changed on its way back, or used
        twice. Returns the reason if it is refused.
        """
        others = found.without_cells() if found.without_cells is not None else None
        if others is None or not others:
            return None
        before = [*self._layers]
        choice = self._choose(others, final=True)
        if not choice.loops and others.undecided(self._examined):
            self.undecided = others.undecided(self._examined)
            self.refuse_short(f"what is to be carried in {type(self._model).__name__}", "carry.reset()")
        outcome = self._outcome(entry, others, choice) if choice.loops else PiecesAndWhole(False)
        if outcome.holds or (choice.loops and not outcome.tried and not outcome.refused):
            self._silent = None if self._silent is None else self._silent & {layer.name for layer in self._layers}
            return others, choice, outcome
        self._layers[:] = before
        self._choose(found, final=True)
        return outcome.why_not if outcome.refused else None

    def refuse_short(self, what: str, then: str) -> None:
        """Raise since a call has too few steps to show something that must be known."""
        if self.undecided:
            self._looks = _LOOKS  # the first longer call is watched, however many short ones come before
            raise CarryError(
                f"{what} this call is too short to tell: {'; '.join(self.undecided)}. Call it once with three steps or "
                f"more of anything, then {then}."
            )


def _missing(loaded: Mapping[str, Set[str]], found: Sequence[Layer]) -> list[str]:
    """Return the layers of a checkpoint that `found` does not contain with the same parts."""
    parts = {layer.name: set(layer.spec.parts) for layer in found}
    return sorted(name for name, own in loaded.items() if parts.get(name) != own)


def _last(found: Layers, loop: Layer) -> list[Tensor]:
    return [values[-1] for values in found.live(loop).values() if values]
