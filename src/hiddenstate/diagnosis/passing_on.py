"""What the layers of one call pass to each other: an encoder's state, and whether all of it arrives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from ..cells import Call, EndState, OuterCall, memory_of
from ..state import tensors
from .rule import Symptom


class StartWatch:
    """Sees a layer that starts from the h of another one, and from zeros where that one's c would belong."""

    def __init__(self) -> None:
        """Begin before the first call."""
        self._ended = ""  # the last layer that ended in a c
        self.lost: tuple[str, str] | None = None  # the layer that starts so, and the one whose c is lost

    def see(self, call: Call) -> None:
        """Look at a call that was made, in the order in which they are."""
        self.enter(call)
        self.leave(call)

    def enter(self, call: Call) -> None:
        """Look at what a layer is handed."""
        given = call.given
        if self._ended not in ("", call.layer.label) and given is not None and {"h", "c"} <= set(given):
            rows = given["h"].detach().movedim(given.batch_axis["h"], 0).flatten(1)
            if len(rows) > 1 and not bool((rows == rows[:1]).all()) and not bool(given["c"].any()):
                self.lost = self.lost or (call.layer.label, self._ended)

    def leave(self, call: Call) -> None:
        """Look at what it ended in."""
        if "c" in call.state:
            self._ended = call.layer.label

    def symptom(self) -> Symptom | None:
        """Return what was seen."""
        if self.lost is None:
            return None
        layer, other = self.lost
        return Symptom(
            "warning",
            layer,
            f"it starts from an h that differs from row to row, and from a c that is all zero: what {other} has in its "
            f"c is lost (needed: both).",
            "only h is handed on from one layer to the other, or c is made anew",
            "_, (h, c) = self.encoder(x); out, _ = self.decoder(y, (h, c))",
            {"c": 0.0},
        )


class PassingOn:
    """Sees, in one training call, which layers run and give nothing that another layer is handed."""

    def __init__(self) -> None:
        """Begin before the call."""
        self.starts = StartWatch()
        self._arguments: list[tuple[str, Tensor]] = []  # of the model's forward
        self._read: dict[str, str] = {}  # layer -> the argument that it ran along, "" where that is not clear
        self._ended: dict[str, tuple[EndState, int | None]] = {}  # layer -> what it ended in, where its output lies
        self._handed: set[str] = set()  # layers of which another one was handed something
        self._modules: dict[str, nn.Module] = {}  # those that ran with a graph

    def called(self, entry: OuterCall) -> None:
        """Note what the model is called with."""
        names = _names(entry.module)
        given = [*((names[at] if at < len(names) else "", arg) for at, arg in enumerate(entry.args))]
        self._arguments += [(n, arg) for n, arg in (*given, *entry.kwargs.items()) if n and isinstance(arg, Tensor)]

    def enter(self, call: Call) -> None:
        """Note what a layer is handed, before it runs."""
        self.starts.enter(call)
        name = call.layer.name or "model"
        self._read.setdefault(name, self._argument_of(call))
        given, memory = call.given_native, {memory_of(part) for part in tensors(call.input).values()}
        for other, (ended, output) in self._ended.items():
            if other != name and ((given is not None and ended.handed_on(given)) or output in memory - {None}):
                self._handed.add(other)

    def leave(self, call: Call) -> None:
        """Note what it gave."""
        self.starts.leave(call)
        name = call.layer.name or "model"
        self._ended[name] = EndState.of(call.state_native), memory_of(call.output)
        if any(part.requires_grad for part in tensors(call.result).values()):
            self._modules[name] = call.layer.module

    def unused(self, without: Sequence[str], model: nn.Module) -> tuple[list[Symptom], list[str]]:
        """Return the layers of whose parameters none has a gradient, and the parameters that this does not explain."""
        found: list[Symptom] = []
        names = {module: name for name, module in model.named_modules()}
        left = list(without)
        for layer, module in self._modules.items():
            path = names.get(module)
            own = [n for n, p in model.named_parameters() if p.requires_grad and n.startswith(f"{path}.")]
            if not path or layer in self._handed or not own or not set(own) <= set(without):
                continue
            argument = self._read[layer]
            found.append(_unused(layer, argument, len(own)))
            around = path.rpartition(".")[0] or path  # what stands before it in its own module, as an embedding
            left = [n for n in left if not n.startswith((f"{path}.", f"{around}."))]
        return found, left

    def _argument_of(self, call: Call) -> str:
        """Return the model's argument that a layer runs along: it itself, or the one that has its rows and steps."""
        memory = {memory_of(part) for part in tensors(call.input).values()} - {None}
        very = [name for name, value in self._arguments if memory_of(value) in memory]
        sizes = {(call.rows, call.steps), (call.steps, call.rows)}
        alike = [name for name, value in self._arguments if tuple(value.shape[:2]) in sizes]
        return very[0] if very else alike[0] if len(alike) == 1 and call.steps > 1 else ""


def _names(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError, AttributeError):
        return []


def _unused(layer: str, argument: str, parameters: int) -> Symptom:
    what = f"{argument}, which {layer} runs along" if argument else f"the input of {layer}"
    return Symptom(
        "warning",
        argument or layer,
        f"{layer} ran, and no gradient came back to any of its {parameters} parameters (limit 0): nothing of {what}, "
        f"reaches the loss.",
        "what is made of it is dropped, overwritten, or detached on the way: an encoder's state, for one, that the "
        "decoder is not handed",
        "# hand on what is made of it: _, state = self.encoder(source); out, _ = self.decoder(target, state)",
        {"parameters": parameters, "limit": 0.0},
    )
