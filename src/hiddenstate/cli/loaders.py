"""Loading what a command is given: a model as `package.module:factory`, inputs as files or as text."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..errors import BadInput, HiddenStateError

Loaded = tuple[nn.Module, tuple[Any, ...]]

# The prefixes that DataParallel, DDP and torch.compile add to the names of weights.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")


class TheirCodeFailed(HiddenStateError, RuntimeError):
    """The user's own module or factory raised an error, which is the cause of this one."""


def load_model(name: str, weights: str | None = None) -> Loaded:
    """Return the model that `package.module:factory` names, with its inputs if the factory returns some."""
    made: Any = load_object(name, "a model")
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise BadInput(f"{name} is {type(made).__name__}: a model, or a function that makes one, is needed.")
        made = _called(made, name)
    inputs: tuple[Any, ...] = ()
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        made, *rest = made
        inputs = tuple(rest)
    if not isinstance(made, nn.Module):
        raise BadInput(f"{name} returned {type(made).__name__}: an nn.Module, or (model, *inputs), is needed.")
    if weights is not None:
        load_weights(made, weights)
    return made, inputs


def load_weights(model: nn.Module, file: str) -> None:
    """Load the weights of a checkpoint into a model; raise and name what does not fit, unless all fit."""
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        found = _checkpoint(path)
    except Exception as error:
        raise BadInput(
            f"{path} cannot be read as weights ({type(error).__name__}): it is no checkpoint, or holds more than "
            f"tensors, which is never opened. torch.save(model.state_dict(), path) or a .safetensors file is needed."
        ) from error
    weights = {_PREFIXES.sub("", str(name)): value for name, value in found.items() if isinstance(value, Tensor)}
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or unknown or shapes:
        said = {"it lacks": missing, "the model has no": unknown, "of another shape are": sorted(shapes)}
        lists = "; ".join(f"{what} {_some(names)}" for what, names in said.items() if names)
        raise BadInput(f"the weights in {path} are not those of {type(model).__name__}: {lists}.")
    model.load_state_dict(weights)


def _checkpoint(path: Path) -> dict[str, Any]:
    """Return the state dict in a file. Only tensors are read, whatever else a checkpoint may contain."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    for inside in ("state_dict", "model_state_dict", "model"):  # as Lightning and most training loops save it
        found = found[inside] if isinstance(found.get(inside), dict) else found
    return dict(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_object(name: str, what: str) -> Any:
    """Return the object that `package.module:name` or `path/to/file.py:name` names."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise BadInput(f"{what} is named package.module:name or file.py:name, but this is {name!r}.")
    module = _module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [key for key in vars(module) if not key.startswith("_")], 3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise BadInput(f"{place} has nothing named {part!r}.{hint}")
        found = getattr(found, part)
    return found


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _file(Path(place))
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # The module itself is missing; a missing import inside it is reported differently.
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise BadInput(f"there is no module named {error.name!r}, looked for from {Path.cwd()}.") from None
        raise TheirCodeFailed(f"importing {place} failed: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise TheirCodeFailed(f"importing {place} failed: {type(error).__name__}: {error}") from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its classes are looked up by the name of their module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TheirCodeFailed(f"running {path} failed: {type(error).__name__}: {error}") from error
    return module


def _called(factory: Callable[[], Any], name: str) -> Any:
    import inspect

    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise BadInput(
            f"{name} cannot be called without arguments ({error}): write a function that takes none and returns the "
            f"model, and name that."
        ) from None
    except ValueError:
        pass  # some built-in callables have no signature
    try:
        return factory()
    except Exception as error:
        raise TheirCodeFailed(f"{name}() failed: {type(error).__name__}: {error}") from error


def load_inputs(files: Sequence[str], model: nn.Module, *, batch_axis: int = 0) -> tuple[Tensor, ...]:
    """Return the tensors in these files on the device of the model, floating-point ones in its dtype."""
    like = next((w for w in model.parameters() if w.is_floating_point()), torch.zeros(()))
    tensors = [_read(name, batch_axis) for name in files]
    return tuple(x.to(like.device, like.dtype if x.is_floating_point() else torch.int64) for x in tensors)


def _read(name: str, batch_axis: int) -> Tensor:
    file, _, key = name.partition(".safetensors:")
    path = Path(f"{file}.safetensors" if key else name)
    if not path.is_file():
        raise BadInput(f"there is no file {path}.")
    try:
        if path.suffix == ".npy":
            return _numpy(path)
        if path.suffix == ".csv":
            return _csv(path).unsqueeze(batch_axis)
        if path.suffix == ".safetensors":
            return _safetensors(path, key)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{path} cannot be read as {path.suffix}: {error}") from error
    raise BadInput(f"an input is a .npy, .safetensors or .csv file, but this is {path}. Pickles are never opened.")


def _numpy(path: Path) -> Tensor:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise BadInput(f"{path} is no file of numpy's, whatever its name: numpy.save(path, array) writes one.")
    try:
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise BadInput(f"{path} holds Python objects, not numbers; pickles are never opened.") from error


def _csv(path: Path) -> Tensor:
    """Read one sequence: a line for each step, a column for each feature, with or without a header."""
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise BadInput(f"{path} is empty.")
    try:
        [float(cell) for cell in lines[0].split(",")]
    except ValueError:
        del lines[0]  # the header
    if not lines:
        raise BadInput(f"{path} has no lines with numbers.")
    return torch.from_numpy(numpy.loadtxt(lines, delimiter=",", ndmin=2))


def _safetensors(path: Path, key: str) -> Tensor:
    from safetensors.torch import load_file

    found = load_file(path)
    if key and key not in found:
        raise BadInput(f"{path} has no tensor {key!r}, only {', '.join(sorted(found))}.")
    if not key and len(found) != 1:
        raise BadInput(f"{path} has {len(found)} tensors ({', '.join(sorted(found))}): name one as {path}:name.")
    return found[key] if key else next(iter(found.values()))


def load_text(text: str, encode: str | None, model: nn.Module, *, batch_axis: int = 0) -> tuple[Tensor, list[str]]:
    """Return `text` as one row of token numbers, and a string for each; without an encoder, tokens are UTF-8 bytes."""
    if not text:
        raise BadInput("--text is empty: there is no step to run.")
    if encode is None:
        numbers = list(text.encode())
        tokens = list(text) if len(numbers) == len(text) else [chr(n) if n < 128 else f"{n:02x}" for n in numbers]
    else:
        numbers = [int(n) for n in torch.as_tensor(_encoded(encode, text)).flatten()]
        tokens = list(text) if len(numbers) == len(text) else [str(n) for n in numbers]
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is not None and numbers and max(numbers) >= table.num_embeddings:
        how = "" if encode else " They are UTF-8 bytes: name your own encoder with --encode package.module:function."
        raise BadInput(f"the text has token {max(numbers)}, but the embedding has {table.num_embeddings} entries.{how}")
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    return torch.tensor(numbers, device=device).unsqueeze(batch_axis), tokens


def _encoded(encode: str, text: str) -> Any:
    function = load_object(encode, "an encoder")
    try:
        return function(text)
    except Exception as error:
        raise TheirCodeFailed(f"{encode} failed on the text: {type(error).__name__}: {error}") from error
