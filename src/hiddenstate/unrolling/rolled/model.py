"""The loops of a model: found in the code of its modules, and run through what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ...cells import Arguments, Rank, around, watchers
from ..engines import switched_off
from .loop_code import LeftAlone
from .site import Site
from .source import resolves_to_builtins, rewrite


class RolledLoops:
    """The loops of a model, run by the engine where that is faster, until it is closed."""

    def __init__(self, model: nn.Module) -> None:
        """Read the code of the model's own modules."""
        self.sites: list[Site] = []
        self.left_alone: list[str] = []
        self._handles = []
        for name, module in model.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            made = self._made(name, module)
            if made is not None:
                self._handles.append(around(module, partial(_instead, module, made), rank=Rank.ACCELERATE))

    def close(self) -> None:
        """Have the code run as it is written again."""
        for handle in self._handles:
            handle.remove()

    def lines(self) -> list[str]:
        """Return a line for each loop."""
        return [*(f"{site.where}: {site.said}" for site in self.sites), *self.left_alone]

    def _made(self, name: str, module: nn.Module) -> FunctionType | None:
        function = getattr(type(module), "forward", None)
        if not isinstance(function, FunctionType) or "forward" in module.__dict__ and not _ours(module):
            return None
        sites: list[Site] = []

        def enter(number: int, names: dict[str, Any], over: tuple[Any, ...]) -> Any:
            return sites[number].enter(names, over)

        def leave(number: int, seen: Any, names: dict[str, Any]) -> None:
            sites[number].leave(seen, names)

        label = f"{name or 'the model itself'} ({type(module).__name__})"
        try:
            found = rewrite(function, enter, leave)
        except LeftAlone as reason:
            self.left_alone.append(f"{label}, line {reason.line}: left alone: {reason.reason}")
            return None
        if found is None:
            return None
        for reason in found.left_alone:
            self.left_alone.append(f"{label}, loop of line {reason.line}: left alone: {reason.reason}")
        if not found.loops or not resolves_to_builtins(function):
            return None
        sites += [Site(code, function, f"{label}, loop of line {code.line}") for code in found.loops]
        self.sites += sites
        return found.function


def _ours(module: nn.Module) -> bool:
    return isinstance(getattr(module.__dict__["forward"], "real", None), MethodType)


def _instead(
    module: nn.Module, made: FunctionType, arguments: Arguments, run: Callable[[Arguments], Any]
) -> Any:
    if switched_off() or watchers():
        return run(arguments)
    args, kwargs = arguments
    return made(module, *args, **kwargs)
