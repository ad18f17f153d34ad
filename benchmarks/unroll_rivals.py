"""Cells as one writes them by hand, and every way to run one along time."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hiddenstate as hs

SLOW = ("compile", "scan")  # rivals that take long to compile or to run
_CHUNK = 16  # steps at most that are compiled as one: all of them would take minutes to hours


class TanhCell(nn.Module):
    """A plain recurrent cell, as one writes it by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


class GRUCell(nn.Module):
    """A GRU by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        xr, xz, xn = self.inner(x).chunk(3, -1)
        hr, hz, hn = self.recurrent(h).chunk(3, -1)
        update = torch.sigmoid(xz + hz)
        return (1 - update) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + update * h


class LSTMCell(nn.Module):
    """An LSTM by hand; with `norm`, its gates are normalized, which no fused kernel does."""

    def __init__(self, size: int, norm: bool = False) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, 4 * size), nn.Linear(size, 4 * size)
        self.norm_x, self.norm_h = (nn.LayerNorm(4 * size) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the next state."""
        h, c = state
        i, f, g, o = (self.norm_x(self.inner(x)) + self.norm_h(self.recurrent(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


# kind -> torch's layer, torch's cell, the cell by hand
KINDS: dict[str, tuple[type[nn.RNNBase], type[nn.RNNCellBase] | None, Callable[[int], nn.Module]]] = {
    "lstm": (nn.LSTM, nn.LSTMCell, LSTMCell),
    "gru": (nn.GRU, nn.GRUCell, GRUCell),
    "tanh": (nn.RNN, nn.RNNCell, TanhCell),
    "layernorm": (nn.LSTM, None, lambda size: LSTMCell(size, norm=True)),
}


class Loop(nn.Module):
    """The loop that everybody writes, over a cell with one state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return all outputs (batch, time, unit) and the last state."""
        outputs: list[Tensor] = []
        for now in x.unbind(1):
            h = self.cell(now, h)
            outputs.append(h)
        return torch.stack(outputs, 1), h


class PairLoop(nn.Module):
    """The same loop over a cell with two states."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return all outputs (batch, time, unit) and the last state."""
        outputs: list[Tensor] = []
        for now in x.unbind(1):
            state = self.cell(now, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state


class Rivals:
    """Every way to run one kind of cell along `x`, made when it is asked for."""

    def __init__(self, kind: str, x: Tensor) -> None:
        self.x, (batch, steps, size) = x, x.shape
        self._types, self._like = KINDS[kind], {"device": x.device, "dtype": x.dtype}
        self.cell = self._types[2](size).to(**self._like)
        zeros = x.new_zeros(batch, size)
        self.pair = isinstance(self.cell, LSTMCell)
        self.first = (zeros, zeros.clone()) if self.pair else zeros
        self._chunk = max(n for n in range(1, _CHUNK + 1) if steps % n == 0)

    def make(self, name: str) -> Callable[[], Tensor]:
        """Return one way, as a call without arguments, or raise why there is none."""
        makers = {
            "layer": self._layer,
            "ours": lambda: lambda: hs.unroll(self.cell, self.x, engine="fast")[0],
            "loop": lambda: self._run(self._loop(self.cell)),
            "torch cell": self._torch_cell,
            "script": self._script,
            "compile": self._compile,
            "scan": lambda: self._scan,
        }
        return makers[name]()

    def _layer(self) -> Callable[[], Tensor]:
        size = self.x.shape[-1]
        layer = self._types[0](
            size, size, batch_first=True, **self._like
        )  # on its device from birth: weights in one piece
        return lambda: layer(self.x)[0]

    def _loop(self, cell: nn.Module) -> nn.Module:
        return (PairLoop if self.pair else Loop)(cell)

    def _run(self, loop: nn.Module) -> Callable[[], Tensor]:
        return lambda: loop(self.x, self.first)[0]

    def _torch_cell(self) -> Callable[[], Tensor]:
        size, kind = self.x.shape[-1], self._types[1]
        if kind is None:
            raise NotImplementedError("torch has no such cell")
        return self._run(self._loop(kind(size, size, **self._like)))

    def _script(self) -> Callable[[], Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._run(torch.jit.script(self._loop(self.cell)))

    def _compile(self) -> Callable[[], Tensor]:
        torch.compiler.reset()  # what was compiled for other cells counts against this one
        piece = torch.compile(self._loop(self.cell), dynamic=False)

        def run() -> Tensor:
            state, outputs = self.first, []
            for part in self.x.split(self._chunk, 1):
                out, state = piece(part, state)
                outputs.append(out)
            return torch.cat(outputs, 1)

        return run

    def _scan(self) -> Tensor:
        from torch._higher_order_ops.scan import scan

        def step(state: object, now: Tensor) -> tuple[object, Tensor]:
            state = self.cell(now, state)
            return state, (state[0] if self.pair else state).clone()

        return scan(step, self.first, self.x.transpose(0, 1), dim=0)[1].transpose(0, 1)


NAMES = ("layer", "ours", "loop", "torch cell", "script", *SLOW)
