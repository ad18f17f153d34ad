"""Tricky: Python looks at the data, or at a coin, and goes another way."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from .by_index import GRUModel
from .case import (
    FEATURES,
    UNITS,
    Family,
    lengths,
    normal,
    scaled,
    series,
    series_and_lengths,
)

case = Family("by_data")


@case(series(), expect="leave", why="branches on the norm of the state", surprise=scaled(series(), 30.0))
class NormGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = 0.2 * self.w(x_t) + torch.tanh(self.u(h))
            if h.norm() > 15:
                h = h / h.norm()
        return h


@case(series(), expect="leave", why="a value of the state becomes a Python number")
class ItemAsScale(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            scale = 1.0 + h.abs().max().item()
            h = self.cell(x_t / scale, h)
        return h


@case(series(), expect="leave", why="a guard that repairs bad states", surprise=scaled(series(), float("inf")))
class RepairsBadStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.rec = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h, bad = x.new_zeros(x.size(0), UNITS), 0
        for x_t in x.unbind(1):
            h = F.relu(self.inp(x_t) + self.rec(h))
            if not torch.isfinite(h).all():
                h, bad = torch.zeros_like(h), bad + 1
        return h, bad


@case(
    series(),
    expect="leave",
    why="adaptive computation: as many inner steps as the data asks for, often the same number",
    surprise=scaled(series(), 10.0),
)
class AdaptiveComputation(GRUModel):
    def __init__(self):
        super().__init__()
        self.halt = nn.Linear(UNITS, 1)

    def forward(self, x):
        h, ponder = self.start(x), 0.0
        for x_t in x.unbind(1):
            budget, state, inner = x.new_zeros(x.size(0), 1), torch.zeros_like(h), 0
            while (budget < 1 - 0.01).any() and inner < 6:
                h = self.cell(x_t, h)
                p = torch.minimum(torch.sigmoid(self.halt(h)), 1 - budget)
                budget, state, inner = budget + p, state + p * h, inner + 1
            h, ponder = state, ponder + inner
        return h, ponder


@case(series(), expect="leave", why="ends when the state no longer moves", surprise=scaled(series(), 0.0))
class UntilSettled(GRUModel):
    def forward(self, x):
        h, steps = self.start(x), 0
        for x_t in x.unbind(1):
            new = self.cell(x_t, h)
            moved = (new - h).abs().max()
            h, steps = new, steps + 1
            if moved < 0.1:
                break
        return h, steps


@case(series(), expect="leave", why="attends to all of its past states: the memory grows")
class AttendsToItsPast(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.query = nn.GRUCell(FEATURES + UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        past = [h]
        for x_t in x.unbind(1):
            memory = torch.stack(past, dim=1)
            weights = F.softmax(torch.einsum("bh,bth->bt", self.query(h), memory), dim=1)
            h = self.cell(torch.cat([x_t, torch.einsum("bt,bth->bh", weights, memory)], 1), h)
            past.append(h)
        return torch.stack(past[1:], 1)


@case(series(), expect="leave", why="a cache of keys and values that grows by cat")
class KeyValueCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.back = nn.Linear(FEATURES, 3 * UNITS), nn.Linear(UNITS, FEATURES)

    def forward(self, x):
        cache, feedback, ys = None, torch.zeros_like(x[:, 0]), []
        for x_t in x.unbind(1):
            q, k, v = self.qkv(x_t + feedback).unsqueeze(1).chunk(3, -1)
            cache = (k, v) if cache is None else (torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1))
            y = F.scaled_dot_product_attention(q, *cache).squeeze(1)
            feedback = self.back(y)
            ys.append(y)
        return torch.stack(ys, 1)


@case(series(), expect="leave", why="the data says which input is read next")
class JumpingReader(GRUModel):
    def __init__(self):
        super().__init__()
        self.jump = nn.Linear(UNITS, 3)

    def forward(self, x):
        h, t, read = self.start(x), 0, []
        while t < x.size(1):
            h = self.cell(x[:, t], h)
            read.append(t)
            t += 1 + int(self.jump(h).mean(0).argmax())
        return h, read


@case(series_and_lengths, expect="leave", why="only the rows that go on are stepped: the batch shrinks")
class ActiveRowsOnly(GRUModel):
    def forward(self, x, lengths):
        h = self.start(x)
        for t in range(int(lengths.max())):
            active = lengths > t
            h = h.clone()
            h[active] = self.cell(x[active, t], h[active])
        return h


def _packed(batch, steps):
    return (pack_padded_sequence(normal(batch, steps, FEATURES), lengths(batch, steps), batch_first=True),)


@case(_packed, expect="leave", why="a packed sequence, gone through by its batch sizes", doubles=False)
class OverPackedRows(GRUModel):
    def forward(self, packed):
        h, at = packed.data.new_zeros(int(packed.batch_sizes[0]), UNITS), 0
        outs = []
        for size in packed.batch_sizes.tolist():
            new = self.cell(packed.data[at : at + size], h[:size])
            h = torch.cat([new, h[size:]], 0)
            outs.append(new)
            at += size
        return torch.cat(outs, 0), h


def _rows_of_lists(batch, steps):
    return [row[:size] for row, size in zip(normal(batch, steps, FEATURES), lengths(batch, steps), strict=True)]


@case(
    lambda batch, steps: (_rows_of_lists(batch, steps),),
    expect="may",
    why="each row is a loop of its own, of its own length",
)
class RowByRowOfItsOwnLength(GRUModel):
    def forward(self, rows):
        finals = []
        for row in rows:
            h = row.new_zeros(1, UNITS)
            for x_t in row:
                h = self.cell(x_t.unsqueeze(0), h)
            finals.append(h)
        return torch.cat(finals)


@case(series_and_lengths, expect="may", why="the number of steps is read from a tensor; the body is the same")
class UpToTheLongest(GRUModel):
    def forward(self, x, lengths):
        h, ys = self.start(x), []
        for t in range(int(lengths.max())):
            h = self.cell(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(
    lambda batch, steps: (normal(batch, steps, FEATURES), normal(steps, salt=3).abs() + 0.1),
    expect="leave",
    why="as many solver steps as the gap is long",
    input_grads=False,
)
class AdaptiveSubsteps(GRUModel):
    def forward(self, x, gaps):
        h = self.start(x)
        for x_t, gap in zip(x.unbind(1), gaps, strict=True):
            n = max(1, int(gap / 0.4))
            for _ in range(n):
                h = h + float(gap) / n * (self.cell(x_t, h) - h)
        return h


def _words_and_moves(batch, steps):
    moves = ([0, 0] + [1, 0] * steps)[: 2 * steps - 1]
    return normal(batch, steps, FEATURES), moves


@case(_words_and_moves, expect="leave", why="shift or reduce, as a list of moves says; the state is a stack", least=2)
class ShiftReduce(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.compose = nn.Linear(FEATURES, UNITS), nn.Linear(2 * UNITS, UNITS)

    def forward(self, x, moves):
        buffer, stack = list(self.embed(x).unbind(1))[::-1], []
        for move in moves:
            if move == 0 and buffer:
                stack.append(buffer.pop())
            elif len(stack) > 1:
                right, left = stack.pop(), stack.pop()
                stack.append(torch.tanh(self.compose(torch.cat([left, right], 1))))
        return stack[-1]


@case(series(), why="the gate is rounded, with a straight-through gradient; nothing leaves the tensors")
class SkipRNN(GRUModel):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(UNITS, 1)

    def forward(self, x):
        h, u, updates = self.start(x), x.new_ones(x.size(0), 1), []
        for x_t in x.unbind(1):
            hard = torch.round(u)
            binary = hard + u - u.detach()
            h = binary * self.cell(x_t, h) + (1 - binary) * h
            delta = torch.sigmoid(self.gate(h))
            u = binary * delta + (1 - binary) * (u + torch.minimum(delta, 1 - u))
            updates.append(binary)
        return h, torch.cat(updates, 1)


@case(series(), expect="leave", why="numpy in the loop: no tensor operation shows what it did", doubles=False)
class SmoothedByNumpy(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            smooth = np.clip(h.detach().numpy(), -0.1, 0.1) ** 2
            ys.append(h + torch.from_numpy(smooth))
        return torch.stack(ys, 1)


@case(series(), expect="leave", why="noise of numpy's and of Python's generators", doubles=False)
class NoiseFromElsewhere(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            jitter = torch.as_tensor(np.random.normal(size=x_t.shape), dtype=x.dtype)
            h = self.cell(x_t + 0.1 * jitter, h) + random.gauss(0.0, 0.1)
        return h


def _some_masked(batch, steps):
    mask = torch.ones(batch, steps)
    mask[0, 1::3] = 0
    return normal(batch, steps, FEATURES), mask


def _all_masked_at_times(batch, steps):
    x, mask = _some_masked(batch, steps)
    mask[:, 2::3] = 0
    return x, mask


@case(_some_masked, expect="leave", why="a step that no row takes is skipped by Python", surprise=_all_masked_at_times)
class SkipsEmptySteps(GRUModel):
    def forward(self, x, mask):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            m = mask[:, t].unsqueeze(1)
            if m.any():  # noqa: SIM108
                h = m * self.cell(x[:, t], h) + (1 - m) * h
            else:
                h = 0.5 * h
            ys.append(h)
        return torch.stack(ys, 1)


def _no_new_episodes(batch, steps):
    return normal(steps, batch, FEATURES), torch.zeros(steps, batch)


def _new_episodes(batch, steps):
    x, starts = _no_new_episodes(batch, steps)
    starts[steps // 2, 0] = 1
    return x, starts


@case(
    _no_new_episodes, expect="may", why="a fast way where no episode starts, a loop otherwise", surprise=_new_episodes
)
class RecurrentPolicy(nn.Module):
    """The recurrent policy of a well-known RL library."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS)

    def forward(self, features, episode_starts):
        state = (features.new_zeros(1, features.size(1), UNITS), features.new_zeros(1, features.size(1), UNITS))
        if torch.all(episode_starts == 0.0):
            return self.lstm(features, state)
        outputs = []
        for x_t, start in zip(features, episode_starts, strict=True):
            keep = (1.0 - start).view(1, -1, 1)
            y, state = self.lstm(x_t.unsqueeze(0), (keep * state[0], keep * state[1]))
            outputs.append(y)
        return torch.cat(outputs), state


@case(series(), expect="leave", why="a closure counts, and the step reads it", seen=lambda model: model.count())
class ClosureCounter(GRUModel):
    def __init__(self):
        super().__init__()
        total = 0

        def tick():
            nonlocal total
            total += 1
            return total

        self.tick, self.count = tick, lambda: total

    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h) / self.tick() ** 0.1
        return h


@case(series(), expect="may", why="an assertion on the state in each step", surprise=scaled(series(), 0.5))
class Asserts(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            assert h.abs().max() <= 1.0, "the state left its range"
        return h
