"""The loops of a model: finding them in the code of its modules, and running each in the way known for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ...cells import Arguments, Handle, Rank, around, unwrap, watchers
from ..engines import switched_off
from .index import LeftAlone
from .site import LoopSite
from .source import has_loops, resolves_to_builtins, rewrite


class RolledLoops:
    """The loops of a model, run by the engine where that is faster, from `open()` until `close()`."""

    def __init__(self, model: nn.Module) -> None:
        """Read the code of the model's own modules."""
        self.sites: list[LoopSite] = []
        self.left_alone: list[str] = []
        self._made_for: list[tuple[nn.Module, FunctionType]] = []
        self._handles: list[Handle] = []
        for name, module in unwrap(model).named_modules():
            if type(module).__module__.split(".")[0] not in ("torch", "hiddenstate"):
                made = self._made(name, module)
                if made is not None:
                    self._made_for.append((module, made))

    def open(self) -> None:
        """Have the loops ask from now on what is to run in their place."""
        for module, made in self._made_for:
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
        if (
            not isinstance(function, FunctionType)
            or not has_loops(function, type(module))
            or ("forward" in module.__dict__ and not _ours(module))
        ):
            return None
        written = _Functions(f"{name or 'the model itself'} ({type(module).__name__})", type(module))
        made = written.of(function)
        self.sites += written.sites
        self.left_alone += written.left_alone
        return made if written.sites else None


class _Functions:
    """The forward of a module, and the functions of the user's own that it calls, with their loops asked for."""

    def __init__(self, label: str, owner: type) -> None:
        self.label, self.owner = label, owner
        self.sites: list[LoopSite] = []
        self.left_alone: list[str] = []
        self._made: dict[FunctionType, FunctionType] = {}

    def of(self, function: FunctionType) -> FunctionType:
        """Return a function with its loops asked for, once."""
        if function in self._made:
            return self._made[function]
        self._made[function] = function  # where it calls itself, as it is
        own: list[LoopSite] = []

        def enter(number: int, names: dict[str, Any], over: tuple[Any, ...]) -> Any:
            return own[number].enter(names, over)

        def leave(number: int, seen: Any, names: dict[str, Any]) -> None:
            own[number].leave(seen, names)

        where = self.label if function.__name__ == "forward" else f"{self.label}, in {function.__name__}"
        try:
            found = rewrite(function, self.owner, enter, leave, self.via)
        except LeftAlone as reason:
            self.left_alone.append(f"{where}, line {reason.line}: left alone: {reason.reason}")
            return function
        for each in found.left_alone:
            self.left_alone.append(f"{where}, loop of line {each.line}: left alone: {each.reason}")
        if not resolves_to_builtins(function):
            return function
        own += [LoopSite(code, function, f"{where}, loop of line {code.line}") for code in found.loops]
        self.sites += own
        for called in found.calls:
            self.of(called)
        self._made[function] = found.function
        return found.function

    def via(self, called: Any) -> Any:
        """Return what runs in place of a function that is called."""
        if isinstance(called, MethodType):
            made = self._made.get(called.__func__) if isinstance(called.__func__, FunctionType) else None
            return called if made is None else MethodType(made, called.__self__)
        return self._made.get(called, called) if isinstance(called, FunctionType) else called


def _ours(module: nn.Module) -> bool:
    return isinstance(getattr(module.__dict__["forward"], "real", None), MethodType)


def _instead(module: nn.Module, made: FunctionType, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    if switched_off() or watchers():
        return run(arguments)
    args, kwargs = arguments
    return made(module, *args, **kwargs)
