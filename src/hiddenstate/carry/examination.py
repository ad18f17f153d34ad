"""What recurs in a model beside the layers that types tell of: found in the user's calls, chosen, and proven."""

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

_SEEN = re.compile(r"(^|\.)(loop|layer|attribute|cell|cache)\d+_*$")  # what is found by its behavior is called so
_LOOKS = 3  # calls that are watched at most, where they are too short to tell what recurs


class Examination:
    """Watches calls of a model until it is known what recurs in it, and decides what of that is carried."""

    def __init__(self, model: nn.Module, found: list[Layer], options: CarryOptions, carrier: Carrier) -> None:
        """Begin with the layers of `model` that types tell of; `found` is changed as calls tell more."""
        self.loops, self.adopted = Loops(model), AdoptedAttributes(model)
        self.handed_in: frozenset[str] = frozenset()  # layers whose first state comes with the call of the model
        self.made_of_input: frozenset[str] = frozenset()  # and those whose first state is made of something in it
        self.handles: list[Handle] = []  # of what was found on the way
        self.undecided: list[str] = []  # what the last call that was watched was too short to tell
        self.open = True  # whether there is anything to do in a call beside handing layers their states
        self._model, self._layers, self._options, self._carrier = model, found, options, carrier
        # How many calls may still be watched: a short one may not tell.
        self._own_code = has_own_code(model)
        self._looks = _LOOKS if self._own_code else 0
        self._told: set[str] = set()
        self._heard = [*found]
        self._seats: dict[nn.Module, Handle] = {}  # of cells that calls have shown
        self._silent: set[str] | None = {layer.name for layer in found}  # never called so far; None: it was reported
        self._examined: frozenset[str] = frozenset()  # lines of loops of which calls have told
        self._proven: set[str] = set()  # layers with which that was seen
        self._tries = 0  # calls in which it could not be tried
        self._times: tuple[tuple[Any, int], ...] = ()  # axes of the model's inputs that are time
        self._rows: list[tuple[Any, int]] | None = None  # and those that were seen to count rows in every call
        self._not_of_call: int | None = None  # how many rows a call has, where the states have others
        self._unproven: tuple[Layers, Choice] | None = None  # what was chosen, until pieces were seen to give the whole
        self._cells = True  # whether cells are handed their states, and not the loops that they are in
        self._ways = KnownWays(model)
        self._tried: list[CallWay] = []  # what calls of our own have noted
        self._held = False  # whether pieces were seen to give what the whole gives
        kept = self.adopted
        self._proof = Proof(model, options, carrier, kept.undone, lambda: kept.layers, self.tell, lambda: self._held)

    @property
    def goes_on(self) -> bool:
        """Whether a call may still show more that recurs."""
        return self._looks > 0

    def may_show(self, name: str) -> bool:
        """Say whether a layer of this name may yet be found by a call."""
        return self.goes_on and (bool(_SEEN.search(name)) or name in dict(self._model.named_modules()))

    def around(
        self, entry: OuterCall, run: Callable[[], Any], *, ahead: bool, loaded: Mapping[str, Set[str]]
    ) -> Callable[[], Any]:
        """Return how a call is made so that it is watched; where it has to know `ahead`, one of our own goes first.

        That is so too where only a call tells which of two modules is the cell. A checkpoint with the layers `loaded`
        was made of all that crosses, or of what cells are handed.
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
        """Refuse states of layers, given with their parts, that no call has shown."""
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
        """Take what a second call tells of a model whose loops are known: what the model keeps itself."""
        self._looks = 0 if found.decided else self._looks - 1
        kept = self.adopted.take(found)
        self._layers[:] = [*(layer for layer in self._layers if layer.kind != "attribute"), *kept]
        self._tell_counters()

    def _tell_counters(self) -> None:
        """Say which plain numbers go on counting beside a state that the model keeps."""
        if self.adopted.layers:
            self.tell(
                "not carried, and not put back by a reset: ", [f"{each}, a number" for each in self.adopted.counters()]
            )

    def rows_of(self, inputs: Inputs) -> int | None:
        """Return how many rows a call of the model has, where an axis of its inputs was seen to count them."""
        found = tensors(inputs)
        axes = [(path, axis) for path, axis in self._rows or () if path in found and found[path].dim() > axis]
        sizes = {found[path].shape[axis] for path, axis in axes}
        return sizes.pop() if len(sizes) == 1 else None

    def learn_rows(self, inputs: Inputs, rows: int) -> None:
        """Find which axes of calls' inputs are as long as their states have rows: of the first two, and not time.

        Where steps are read along one axis, the rows lie along the first of the others.
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
        """Refuse indices of rows where the states have others than the call: samples times nodes, say."""
        batches = {state.batch for state in states} if self._not_of_call is not None else set()
        if batches and (isinstance(rows, slice) or torch.as_tensor(rows).dtype is not torch.bool):
            raise CarryError(
                f"carry.reset was told the rows {rows}, but what is carried has {batches.pop()} rows, and the call's "
                f"input has {self._not_of_call}: the model folds other axes into the rows (samples times nodes, say), "
                f"and which of them are meant is not known. Give a bool mask with one entry for each row of "
                f"carry.state, or reset all rows: carry.reset()."
            )

    def tell(self, what: str, things: list[str]) -> None:
        """Warn of what was not said before."""
        new = [each for each in things if each not in self._told]
        self._told.update(new)
        if new:
            warn(f"{what}{'; '.join(new)}. hs.layers(model, *inputs).explain() says more.", CarryWarning)

    def tell_undecided(self, held: Iterable[Attribute], where: str, but: Container[str] = ()) -> None:
        """Say what may be a state, and is not there before a second call has told; all `but` these."""
        raw = [name for module, name in held if self.adopted.label(module, name) not in but]
        self.tell(f"not {where}: ", [f"{name}, of which a second call tells whether it is a state" for name in raw])

    def report_silent(self, entry: nn.Module, called: set[str]) -> None:
        """Say once which layers the first call of the whole model did not reach."""
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
        """Carry what a call has shown to recur, or say that we do not."""
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
        """Listen to layers that a call has shown, each as it was seen last."""
        for layer in new:
            if layer not in self._heard:
                before = self._seats.pop(layer.module, None)
                self._seats[layer.module] = listen(self._model, [layer], self._carrier)
                self._heard = [*(each for each in self._heard if each.module is not layer.module), layer]
                self.handles.append(self._seats[layer.module])
                if before is not None:
                    before.remove()

    def _tell(self, found: Layers, choice: Choice) -> None:
        """Say what is not carried, and what is carried though it does not give what the whole gives."""
        short = set(found.undecided())
        self.tell("not carried: ", [each for each in choice.left if each not in short])
        self.tell("not known to be carried: ", self.undecided)
        self._tell_counters()
        uneven = choice.uneven
        carried = (choice.stays or choice.new) and not (uneven or self._options.override or self.adopted.counts())
        if carried and found.seen is not None and found.seen.mixing is not None:  # with `override`, pieces are tried
            uneven = [str(each) for each in found.seen.mixing()]
        self.tell("carried, but pieces do not give what the whole gives: ", uneven)

    def _choose(self, found: Layers, *, final: bool) -> Choice:
        """Decide what of a call is carried, and begin with what it ended in."""
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
        """Say that a loop is run in a call of a part of the model, in which it is not carried."""
        if not self._carrier.running and self.loops:
            self.tell("not carried in calls of a part of the model by itself: ", [loop.label])
        return run(arguments)

    def _on_reached(self, name: str) -> None:
        """Say that a call goes where none went that was watched, and watch the next one."""
        if not self._looks and name not in self._told:
            self._looks, self.open = 1, True
            self._told.add(name)
            warn(
                f"not carried: what {name!r} may keep, which no call reached before; the next call is watched for it.",
                CarryWarning,
            )

    # -- whether pieces give what the whole gives ----------------------------------------------------------------------

    def new_way(self, entry: OuterCall) -> CallWay | None:
        """Return what notes the way of a call; nothing where no way matters."""
        return self._ways.new() if self._options.override and self._own_code and entry.module is self._model else None

    def trial_way(self) -> CallWay:
        """Return what notes the way of a call of our own: where pieces give the whole, theirs are known ways too."""
        self._tried.append(self._ways.new())
        return self._tried[-1]

    def _learn(self, way: CallWay | None) -> None:
        """Take note of the way of a call, and of those of our own calls by which it was proven."""
        for each in (way, *self._tried):
            self._ways.learn(each, like=way)
        self._tried = []

    def prove(self, entry: OuterCall, way: CallWay | None, replaced: Collection[str], kept: Collection[str]) -> None:
        """See whether pieces of a call's input, with the state put in, give what the whole gives, or refuse.

        Where that was seen, it holds for calls of the same way; `replaced` is where this one was handed our state, of
        what is `kept`.
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
        if tied and (outcome.holds or not outcome.tried):  # on this input, or for all that could be tried
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
        self._unproven, self._held = None, outcome.holds  # a call that is refused leaves it to the next one
        self._cells = found.seen is None or found.seen.cells
        self._learn(way)
        if not outcome.tried and not self._times and self._tries < _LOOKS:
            self._tries, self._looks = self._tries + 1, max(1, self._looks)  # a longer call may yet tell

    def _outcome(self, entry: OuterCall, found: Layers, choice: Choice) -> PiecesAndWhole:
        """Try what was chosen; a loop in whose place the model itself goes on is left to it."""
        if not self._layers and (self.adopted.begun_anew or not self._looks):
            why = (
                f"nothing of {type(self._model).__name__} can be carried, although override=True: "
                f"{'; '.join(choice.left)}. hs.layers(model, *inputs).explain() says more."
            )
            return PiecesAndWhole(False, why_not=why, refused=True)
        if all(layer.name in self.adopted.layers for layer in self._layers):
            return PiecesAndWhole(True)  # nothing was put in the place of anything
        outcome = self._compared(entry, found)
        kept = [loop for loop in choice.loops if self.adopted.holding(_last(found, loop))]
        if not outcome.holds and kept:  # the model goes on by itself from what its loop ended in
            self._layers[:] = [layer for layer in self._layers if layer not in kept]
            self.loops.take(found, [loop for loop in choice.loops if loop not in kept])
            for loop in kept:
                self._carrier.give_up(loop)
            outcome = self._compared(entry, found)
        return outcome

    def _compared(self, entry: OuterCall, found: Layers) -> PiecesAndWhole:
        self._tried = []  # of what did not hold nothing is learned
        return self._proof.compared(entry, found)

    def _without_cells(self, entry: OuterCall, found: Layers) -> tuple[Layers, Choice, PiecesAndWhole] | str | None:
        """Carry what crosses the loops of a call where they start, and not what its cells are handed, if that holds.

        Where it is refused, return why.
        What a cell gave may be read beside it too (attention), changed on its way back, or there twice.
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
        """Refuse a call that has too few steps to show what would have to be known."""
        if self.undecided:
            self._looks = _LOOKS  # however many such calls there are, the first longer one is watched
            raise CarryError(
                f"{what} this call is too short to tell: {'; '.join(self.undecided)}. Call it once with three steps or "
                f"more of anything, then {then}."
            )


def _missing(loaded: Mapping[str, Set[str]], found: Sequence[Layer]) -> list[str]:
    """Return the layers of a checkpoint that are not among these, with the same parts."""
    parts = {layer.name: set(layer.spec.parts) for layer in found}
    return sorted(name for name, own in loaded.items() if parts.get(name) != own)


def _last(found: Layers, loop: Layer) -> list[Tensor]:
    return [values[-1] for values in found.live(loop).values() if values]
