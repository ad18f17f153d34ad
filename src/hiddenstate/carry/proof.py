"""Proving on a call that pieces of its input, with the state handed over, give what the whole gives, or refusing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from ..cells import Layer, Layers, OuterCall, Rank, foreseen, unheard, untouched
from ..errors import CarryError
from .carrier import Carrier, CarryOptions
from .choice import Choice
from .pieces import PiecesAndWhole, Times, compare_pieces, without_dropout

Tell: TypeAlias = "Callable[[str, list[str]], None]"  # warns of things that were not warned of before


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Tries pieces of a call's input against the whole, and raises or warns."""

    model: nn.Module
    options: CarryOptions
    carrier: Carrier
    undone: Callable[[], AbstractContextManager[None]]  # a context in which our calls leave no trace in attributes
    adopted: Callable[[], Mapping[str, Layer]]  # the state that the model keeps itself
    tell: Tell
    held: Callable[[], bool]  # whether pieces were seen to give the whole in an earlier call

    def compared(self, entry: OuterCall, found: Layers, times: Times = ()) -> PiecesAndWhole:
        """Make trial calls with pieces of a call's input, and leave the model unchanged.

        `times` comes from an earlier call, in case this one is too short to show which inputs run along time.
        """
        times = (found.seen.times if found.seen is not None else ()) or times
        with self.undone(), untouched(self.model), unheard(but=Rank.CARRY), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            without_dropout(self.model)
            return compare_pieces((entry.args, entry.kwargs), times, self.carrier.try_call)

    def judge(self, outcome: PiecesAndWhole, found: Layers, choice: Choice, *, before: str = "") -> None:
        """Raise or warn if pieces do not give what the whole gives; `before` is put in front of an error."""
        if outcome.refused:
            raise CarryError(f"{before}{outcome.why_not}")
        if outcome.holds:
            return
        if outcome.tried:
            reasons = _reasons(found, choice)
            line = f", first seen at {outcome.line}" if outcome.line else ""
            text = (
                f"two pieces of this call's input, cut at step {outcome.at}, do not give what the whole gives, "
                f"although the state is put in (largest difference {outcome.error:.2g}): something in "
                f"{type(self.model).__name__} looks across the cut{line}{f' ({reasons})' if reasons else ''}"
            )
            if outcome.why_not:
                text += f"; nor can what its loop starts from be replaced: {outcome.why_not.rstrip('.')}"
        elif choice.uneven:
            text = f"pieces do not give what the whole gives: {'; '.join(choice.uneven)}"
        else:
            self.tell("carried, but whether pieces give what the whole gives was not proven: ", [outcome.why_not])
            return
        if self.options.exact:
            raise CarryError(f"{before}{text}. Carry(model, override=True, exact=False) carries it all the same.")
        self.tell("", [text])

    def again(
        self,
        entry: OuterCall,
        news: str,
        carried: Sequence[Layer],
        replaced: Collection[str],
        *,
        cells: bool,
        times: Times,
    ) -> None:
        """Try again, for a call that takes another way than the proven ones; `news` describes the difference.

        `carried` are the carried layers, `replaced` those that got the carried state instead of the model's own.
        Without `cells`, loops are carried instead of the cells in them.
        """
        name = type(self.model).__name__
        before = (
            f"this call takes another way through {name} than those in which the carried state was seen to be right: "
            f"{news}. The states of before are kept. Let the first call of a Carry go this way, or carry it in a Carry "
            f"of its own. What is so: "
        )
        with torch.no_grad():
            found = foreseen(entry)
        if found is not None and not cells:
            found = found.without_cells() if found.without_cells is not None else None
        if found is None or found.seen is None:
            raise CarryError(f"{before}it could not be looked at by a call of our own")
        choice = Choice.of(found, carried, list(self.adopted().values()), final=True, override=True)
        known = {layer.name for layer in carried} | {layer.name for layer in found if self.adopted() and layer.seen}
        beside = [each.label for each in (*choice.stays, *choice.new, *choice.loops) if each.name not in known]
        if beside:
            raise CarryError(f"{before}{', '.join(beside)} would have to be carried too")
        handed = [each for each in replaced if each in found.seen.handed_in]
        if handed:
            raise CarryError(f"{before}the state of {', '.join(handed)} comes with this call, and was replaced")
        outcome = self.compared(entry, found, times)
        if not outcome.tried and not outcome.drawn and self.held():
            outcome = replace(outcome, refused=True)  # a proof on other ways does not help on this one
        if found.seen.entangled and cells and (outcome.holds or not outcome.tried):
            why = not_theirs(self.model, found.seen.entangled)
            outcome = PiecesAndWhole(False, refused=True, why_not=why)
        self.judge(outcome, found, choice, before=before)


def not_theirs(model: nn.Module, cells: Sequence[str]) -> str:
    """Return the error for cells whose start is also read by others."""
    return (
        f"cells of {type(model).__name__} start from what is not theirs alone, and nothing else can be put in the "
        f"place of what their loop starts from: {'; '.join(cells)}. hs.layers(model, *inputs).explain() says more."
    )


def not_called(layer: str) -> CarryError:
    """Return the error for a call that makes a layer's start but does not call the layer."""
    return CarryError(
        f"this call makes what {layer!r} starts from, but does not call it, so something else goes on from that start, "
        f"and the carried state is not used. The states of before are kept. Call the layer, or make its start where it "
        f"is called."
    )


def read_too(model: nn.Module, lines: Sequence[str], layers: Iterable[str]) -> CarryError:
    """Return the error for a call in which other code reads a start that was replaced, as no earlier call did."""
    return CarryError(
        f"this call takes another way through {type(model).__name__} than those in which the carried state was seen to "
        f"be right: it goes another way at {', '.join(lines[:3])}, and reads there what {', '.join(sorted(layers))} "
        f"starts from, which has given way to the carried state (a mask on it, say). The states of before are kept. "
        f"Let the first call of a Carry go this way, or carry it in a Carry of its own."
    )


def _reasons(found: Layers, choice: Choice) -> str:
    seen = found.seen
    cuts = [f"{cut.module or 'the model'}: {cut.why}" for cut in (seen.cuts if seen is not None else ())]
    handed = [f"{name}: its state comes with the call" for name in (seen.handed_in if seen is not None else ())]
    return "; ".join(dict.fromkeys([*choice.left, *cuts, *handed]))
