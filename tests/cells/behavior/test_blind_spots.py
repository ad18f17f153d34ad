"""States that go where nothing is seen are named; what stands beside the model comes back as it was."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs

X = torch.randn(3, 7, 4)
WORLD: dict[str, Tensor] = {}


class ByNumpy(nn.Module):
    """The state leaves for numpy in every turn."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(len(x), 4), []
        for frame in x.unbind(1):
            h = torch.from_numpy(0.9 * h.numpy() + 0.1 * frame.numpy())
            out.append(h)
        return torch.stack(out, 1)


def squashed(x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(x + h)


class ByScript(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(len(x), 4), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(squashed)
        for frame in x.unbind(1):
            h = scripted(frame, h)
            out.append(h)
        return torch.stack(out, 1)


class ByVmap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h, step = torch.zeros(len(x), 4), torch.vmap(lambda frame, h: torch.tanh(frame + h))
        for frame in x.unbind(1):
            h = step(frame, h)
            y = h * 2
        return y


class Doubling(nn.Module):
    """A scan along time, in as many turns as the length has digits."""

    def forward(self, x: Tensor) -> Tensor:
        a, h, shift = torch.sigmoid(x), x, 1
        while shift < x.shape[1]:
            h = h + a * nn.functional.pad(h, (0, 0, shift, 0))[:, :-shift]
            a = a * nn.functional.pad(a, (0, 0, shift, 0), value=1.0)[:, :-shift]
            shift *= 2
        return h


@pytest.mark.parametrize("make", [ByNumpy, ByScript, ByVmap, Doubling])
@pytest.mark.parametrize("grad", [True, False])
def test_what_goes_out_of_sight_is_named_with_and_without_gradients(make, grad):
    with torch.set_grad_enabled(grad):
        found = hs.layers(make(), X)
    assert not found
    assert found.doubts()


class InTheFile(nn.Module):
    """Keeps its state in a container of the file that it stands in."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for frame in x.unbind(1):
            h = WORLD.get("h", torch.zeros(len(x), 4))
            WORLD["h"] = torch.tanh(self.mix(torch.cat([frame, h.detach()], 1)))
        return WORLD["h"]


def test_looking_leaves_containers_beside_the_model_as_they_were():
    model = InTheFile()
    hs.layers(model, X)
    assert WORLD == {}
    first = model(X)
    kept = WORLD["h"]
    hs.layers(model, X)
    assert WORLD["h"] is kept
    torch.testing.assert_close(first, kept)
    WORLD.clear()


class Descent(nn.Module):
    """Gradient descent that starts from a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w
        for _ in range(6):
            w = w - 0.1 * x.T @ (x @ w - 1)
        return x @ w


def test_an_iteration_may_start_from_a_parameter():
    (found,) = hs.layers(Descent(), torch.randn(6, 4))
    assert found.kind == "iteration"


def test_the_vectors_of_a_spectral_norm_are_no_iteration():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.zeros_like(x)
            for _ in range(8):
                z = torch.tanh(self.mix(z) + x)
            return z

    (found,) = hs.layers(Fixed(), torch.randn(3, 4))
    assert found.spec.parts == ("z",)
