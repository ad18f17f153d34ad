"""The fast engine against JAX: the same cells under `lax.scan`, forward and backward, on one thread of the CPU.

pip install jax && python benchmarks/unroll_jax.py
"""

import os
import time
from collections.abc import Callable

# Before jax is loaded, which reads it once.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch

import hiddenstate as hs
from timing import compare
from unroll_rivals import GRUCell, LSTMCell, TanhCell

SHAPES = ((32, 100, 128), (1, 1000, 256), (64, 256, 512))
Cell = Callable[[dict, object, jax.Array], tuple[object, jax.Array]]


def lstm(weights: dict, state: tuple, x: jax.Array) -> tuple[tuple, jax.Array]:
    """One step of an LSTM."""
    h, c = state
    i, f, g, o = jnp.split(x @ weights["inner"] + weights["b"] + h @ weights["recurrent"] + weights["c"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def gru(weights: dict, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a GRU."""
    xr, xz, xn = jnp.split(x @ weights["inner"] + weights["b"], 3, -1)
    hr, hz, hn = jnp.split(h @ weights["recurrent"] + weights["c"], 3, -1)
    update = jax.nn.sigmoid(xz + hz)
    h = (1 - update) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + update * h
    return h, h


def tanh(weights: dict, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a plain recurrent cell."""
    h = jnp.tanh(x @ weights["inner"] + weights["b"] + h @ weights["recurrent"] + weights["c"])
    return h, h


def by_jax(cell: Cell, gates: int, x: np.ndarray) -> Callable[[], object]:
    """A call that takes all gradients of the sum of all outputs."""
    batch, _, size = x.shape
    draw = np.random.RandomState(0)
    weights = {
        name: jnp.asarray(draw.randn(size, gates * size) / size**0.5, jnp.float32) for name in ("inner", "recurrent")
    }
    weights |= {name: jnp.zeros(gates * size) for name in ("b", "c")}
    zeros = jnp.zeros((batch, size))
    first, steps = (zeros, zeros) if cell is lstm else zeros, jnp.asarray(x.transpose(1, 0, 2))

    def loss(weights: dict, steps: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda state, now: cell(weights, state, now), first, steps)[1].sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(gradient(weights, steps))


def main() -> None:
    """Print one comparison for each shape and cell."""
    torch.set_num_threads(1)
    for batch, steps, size in SHAPES:
        x = torch.randn(batch, steps, size, requires_grad=True)
        for cell, gates, own in ((lstm, 4, LSTMCell), (gru, 3, GRUCell), (tanh, 1, TanhCell)):
            ours = own(size)
            rivals = {
                "lax.scan": by_jax(cell, gates, x.detach().numpy()),
                "hs.unroll": lambda ours=ours, x=x: hs.unroll(ours, x, engine="fast")[0].sum().backward(),
            }
            print(f"\n{cell.__name__}, batch {batch}, {steps} steps, hidden {size}")
            print(compare(rivals, rounds=3 if batch == 64 else 9, warmup=1, clock=time.process_time))


if __name__ == "__main__":
    main()
