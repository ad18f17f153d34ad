"""Lines of code that mend a finding: they fit the kind of layer, run as they stand, and say the rest in a comment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..cells import Layer

_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_GATED = {"lstm": "opens the forget gate", "gru": "keeps more of the state"}


def detaching(held: Iterable[str], layers: Sequence[Layer]) -> str:
    """Return how a state is kept without its graph; `held` names the tensors of a model that have one."""
    names = list(held)
    if names:
        owner, _, attribute = names[0].partition("[")[0].rpartition(".")
        return _detached(f"{path_of('self', owner)}.{attribute}", several="[" in names[0])
    return _detached("hidden", several=any(len(layer.spec.parts) > 1 for layer in layers if layer.seen is None))


def _detached(name: str, *, several: bool) -> str:
    line = f"{name} = tuple(part.detach() for part in {name})" if several else f"{name} = {name}.detach()"
    if several and "." in name:  # an attribute may hold a tuple, a list or a dict
        return f"{name} = hs.State.detached({name})"
    return f"{line}  # hs.State.detached({name}) takes a state of any form"


def path_of(root: str, name: str) -> str:
    """Return a module of a model as one writes it."""
    if not name:
        return root
    return f"{root}.{name}" if all(map(str.isidentifier, name.split("."))) else f'{root}.get_submodule("{name}")'


def remembering(layer: Layer | None) -> str:
    """Return how a layer can be made to pass on more of what came before."""
    module = None if layer is None else layer.module
    if layer is None or not isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "# start with recurrent weights that neither grow nor shrink (nn.init.orthogonal_), or shorter sequences"
    path = path_of("model", layer.name)
    kind, units = layer.kind.removesuffix("_cell"), module.hidden_size
    what, act, why = "weight_hh", "torch.nn.init.orthogonal_({})", "or a GRU or LSTM in its place, or shorter sequences"
    if kind in _GATED and module.bias:
        what, why = "bias_hh", f"{_GATED[kind]}; or shorter sequences"
        act = f"{{}}[{units}:{2 * units}].fill_(1.0)"
    acts = [(what, act)]
    if what == "bias_hh":  # a gate has two biases, and either may be far below zero
        acts.append(("bias_ih", f"{{}}[{units}:{2 * units}].zero_()"))
    lines = []
    for weight, do in acts:
        if isinstance(module, _CELLS) or module.num_layers == 1:
            lines.append(do.format(f"{path}.{weight}{'' if isinstance(module, _CELLS) else '_l0'}"))
        else:
            each = f'getattr({path}, f"{weight}_l{{k}}")'
            lines.append(f"[{do.format(each)} for k in range({module.num_layers})]")
    return f"with torch.no_grad(): {'; '.join(lines)}  # {why}"


def drawn_anew(layer: Layer | None) -> str:
    """Return how the weights of a layer, or of a model that has none of its own, are drawn anew."""
    path = path_of("model", "" if layer is None or layer.seen is not None else layer.name)
    if layer is not None and layer.seen is None and hasattr(layer.module, "reset_parameters"):
        return f"{path}.reset_parameters()"
    module = None if layer is None else layer.module
    if module is not None and any(hasattr(part, "reset_parameters") for part in module.modules()):
        inner = f"[m.reset_parameters() for m in {path}.modules() if hasattr(m, 'reset_parameters')]"
        bare = any(p.dim() > 1 for m in module.modules() if not hasattr(m, "reset_parameters") for p in _own(m))
        return f"{inner}; {_BARE % path}" if bare else inner
    return _BARE % path


_BARE = "[torch.nn.init.normal_(p, std=0.5 * len(p) ** -0.5) for p in %s.parameters(recurse=False) if p.dim() > 1]"


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def freezing(names: Sequence[str], model: nn.Module) -> str:
    """Return how parameters without a gradient are frozen on purpose, where they are not to be used or removed."""
    without = set(names)
    found: dict[str, None] = {}
    for name in names:
        # The outermost module all of whose parameters are without; else the parameter itself.
        parts = name.split(".")
        owners = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        whole = (owner for owner in owners if _parameters(model, owner) <= without)
        found.setdefault(path_of("model", next(whole, name)) if "." in name else f"model.{name}")
    lines = "; ".join(f"{place}.requires_grad_(False)" for place in found)
    return f"{lines}  # on purpose; else use it in forward, or remove it"


def _parameters(model: nn.Module, owner: str) -> set[str]:
    return {f"{owner}.{name}" for name, _ in model.get_submodule(owner).named_parameters()}


CLIPPING = (
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before optimizer.step(); or a smaller learning rate"
)
FILLING = "x = torch.nan_to_num(x)  # for missing values; else look at where these inputs come from"
