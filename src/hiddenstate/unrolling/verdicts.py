"""Which of two kernels is faster for a kind of call: measured once, and kept on disk for later processes."""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, unheard
from ..state import detached, tensors
from .cache_folder import cache_folder
from .deciding import seconds_of
from .precision import cudnn_rounds

_ROUNDS = 9
_T = 2.306  # of Student's distribution: 95 % of a mean over nine rounds lies within so many standard errors
_LONG = 0.5  # seconds of a call from which on fewer rounds have to do
_FEW, _T_FEW = 4, 3.182
_WARM = {"cuda": 4}  # calls of ours before a comparison, where a pass is recorded at its third
_HEARD = 40e-6  # seconds that it takes to hear a call and run it by ours, beside what is measured
_AGAIN = (50, 500)  # calls after which a comparison that left it open is made once more


@dataclass(frozen=True, slots=True)
class Setting:
    """What calls have in common that are decided together: sizes up to the next power of two."""

    layer: str  # its kind and sizes
    dtype: str
    device: str  # with its threads, where that matters
    rows: int
    steps: int
    packed: bool
    backward: bool

    @classmethod
    def of(cls, call: Call, module: nn.RNNBase) -> Setting:
        """Return the setting of a call."""
        x = call.input.data if isinstance(call.input, PackedSequence) else call.input
        leaves = (x, *tensors(call.given_native).values(), *module.parameters())
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves)
        dropped = bool(module.dropout and module.training)
        return cls(
            layer=f"{module.extra_repr()}, {module.mode}{', dropping' if dropped else ''}",
            dtype=_precision(x),
            device=_device(x.device.type, x.device.index, torch.get_num_threads()),
            rows=_rounded(call.rows),
            steps=_rounded(call.steps),
            packed=isinstance(call.input, PackedSequence),
            backward=grad,
        )

    def __str__(self) -> str:
        """Return a few words."""
        ways = "forward and backward" if self.backward else "forward"
        packed = ", packed" if self.packed else ""
        return f"up to {self.rows} rows of {self.steps} steps{packed}, {ways}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether ours is faster, and how that is known."""

    ours: bool
    because: str = ""
    ratio: float = math.nan  # of our time to torch's
    low: float = math.nan  # the ends of its 95 % confidence interval
    high: float = math.nan

    @property
    def sure(self) -> bool:
        """Whether one of the two is faster beyond doubt."""
        return self.high < 1 or self.low > 1

    def __str__(self) -> str:
        """Return a few words."""
        if self.because:
            return f"because {self.because}"
        return f"x {self.ratio:.2f} of torch's time ({self.low:.2f} to {self.high:.2f})"


class Verdicts:
    """Verdicts by setting, in memory and in a file that only its owner can write."""

    _shared: Verdicts | None = None

    def __init__(self, path: Path | None) -> None:
        """Read what earlier processes have found; without a path, or where none can be used, memory alone is used."""
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, Verdict] = self._read()
        self._asked: dict[str, int] = {}  # how often for a verdict that is not sure

    @classmethod
    def shared(cls) -> Verdicts:
        """Return the one of this process."""
        if cls._shared is None:
            try:
                cls._shared = cls(cache_folder() / "verdicts.json")
            except RuntimeError:  # there is no home
                cls._shared = cls(None)
        return cls._shared

    def get(self, setting: Setting) -> Verdict | None:
        """Return what is known of a setting."""
        return self._known.get(_key(setting))

    def due(self, setting: Setting) -> bool:
        """Say whether a call is to be measured: the first, and of those that left it open some later ones.

        A machine that was busy with other things at the first call would otherwise keep torch's kernel for good.
        """
        key = _key(setting)
        known = self._known.get(key)
        if known is None:
            return True
        if known.sure or known.because:
            return False
        self._asked[key] = self._asked.get(key, 0) + 1
        return self._asked[key] in _AGAIN

    def settled(self, setting: Setting) -> bool:
        """Say whether calls like these are never measured again."""
        key = _key(setting)
        known = self._known.get(key)
        return known is not None and (known.sure or bool(known.because) or self._asked.get(key, 0) >= max(_AGAIN))

    def put(self, setting: Setting, verdict: Verdict) -> Verdict:
        """Keep a verdict, also on disk where that can be done, and return it."""
        with self._lock:
            self._known[_key(setting)] = verdict
            if self._path is not None and verdict.sure:  # a reason, or a busy machine, may be gone tomorrow
                with suppress(OSError):  # a full or read-only disk: the next process measures again
                    self._write({**self._read(), **self._known})
        return verdict

    def _read(self) -> dict[str, Verdict]:
        try:
            assert self._path is not None
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {key: Verdict(**fields) for key, fields in content.items()}
        except (OSError, ValueError, TypeError, AttributeError, AssertionError):
            return {}

    def _write(self, known: dict[str, Verdict]) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under another name first: no process ever reads half a file.
        handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".verdicts.")
        kept = {key: asdict(verdict) for key, verdict in known.items() if verdict.sure}
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            os.replace(temporary, self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def compare(
    theirs: Callable[..., Any], ours: Callable[..., Any], arguments: tuple[Any, ...], module: nn.Module
) -> Verdict:
    """Run two ways of one call in turn, forward or forward and backward as it is used, and say which is faster."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    ways = [_once(way, arguments, weights) for way in (theirs, ours)]
    with unheard(), _drawing_nothing(arguments[0]):
        for _ in range(_WARM.get(_data(arguments[0]).device.type, 1)):
            ways[1]()  # its kernels are made, and passes recorded
        longest = max(seconds_of(way) for way in ways)
        count, spread = (_ROUNDS, _T) if longest < _LONG else (_FEW, _T_FEW)
        logs = []
        for _ in range(count):
            their_time, our_time = (seconds_of(way) for way in ways)
            logs.append(math.log((our_time + _HEARD) / their_time))
    middle = math.fsum(logs) / count
    error = math.sqrt(math.fsum((log - middle) ** 2 for log in logs) / (count - 1) / count)
    low, ratio, high = (math.exp(middle + sign * spread * error) for sign in (-1, 0, 1))
    return Verdict(ours=high < 1, ratio=ratio, low=low, high=high)


def _once(way: Callable[..., Any], arguments: tuple[Any, ...], weights: list[nn.Parameter]) -> Callable[[], None]:
    """Return a function that makes a call once; gradients are made and thrown away, nobody's are touched."""
    grad = torch.is_grad_enabled()
    asked = [value.requires_grad for value in _floats(arguments)]

    def once() -> None:
        leaves = tuple(map(_cut, arguments))
        ends = [leaf.requires_grad_(wanted) for leaf, wanted in zip(_floats(leaves), asked, strict=True)]
        made = [value for value in _floats(way(*leaves)) if value.requires_grad]
        inputs = [*(leaf for leaf in ends if leaf.requires_grad), *weights]
        if grad and made and inputs:
            seeds = [torch.ones_like(value) for value in made]
            torch.autograd.grad(made, inputs, seeds, allow_unused=True)

    return once


def _floats(nested: Any) -> list[Tensor]:
    """Return the tensors within arguments or results that may have a gradient: not the indices of a packed sequence."""
    return [tensor for tensor in tensors(nested).values() if tensor.is_floating_point()]


def _cut(argument: Any) -> Any:
    """Return an argument without its graph."""
    if isinstance(argument, PackedSequence):
        return argument._replace(data=argument.data.detach())
    return detached(argument)


def _data(x: Any) -> Tensor:
    data: Tensor = x.data if isinstance(x, PackedSequence) else x
    return data


@contextmanager
def _drawing_nothing(x: Any) -> Iterator[None]:
    """Put the random streams back as they were: dropout was drawn for a trial."""
    device = _data(x).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _precision(x: Tensor) -> str:
    said = [x.dtype]
    if torch.is_autocast_enabled(x.device.type):
        said.append(torch.get_autocast_dtype(x.device.type))
    rounds = x.is_cuda and said == [torch.float32] and cudnn_rounds()
    return ", cast to ".join(str(dtype).removeprefix("torch.") for dtype in said) + (", as tf32" if rounds else "")


def _rounded(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


@cache
def _device(kind: str, index: int | None, threads: int) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name(index)
    return f"{_processor()}, {threads} threads"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform  # which other systems need

    return f"{platform.machine()} {platform.processor()}"


@cache
def _key(setting: Setting) -> str:
    from importlib import metadata

    try:
        version = metadata.version("hiddenstate")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "sources"
    return f"{version} {torch.__version__} {setting!r}"
