"""Mistakes that a later round of unseen models brought, each beside the same model without it, in the `PAIRS`."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_sequence

from tests.diagnosis.patients.misjudged import pair
from tests.diagnosis.patients.noticed import PAIRS

__all__ = ["PAIRS"]


def floats(*shape):
    return torch.randn(*(shape or (4, 9, 3)))


@pair("HS202")
def state_drawn_or_made_of_a_latent(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.GRU(3, 8, batch_first=True), nn.GRU(3, 8, batch_first=True)
            self.mean, self.log_var, self.start = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)

        def forward(self, x):
            summary = self.encoder(x)[1][-1]
            mean, log_var = self.mean(summary), self.log_var(summary)
            latent = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
            start = torch.randn(1, len(x), 8) if sick else torch.tanh(self.start(latent))[None]
            out, _ = self.decoder(x, start)
            return out, mean, log_var, self.start(latent)

    return M(), (floats(),), {}


@pair("HS104")
def read_before_the_update_or_predicted(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.drift, self.head = nn.GRUCell(3, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            h, outs = x.new_zeros(len(x), 8), []
            for x_t in x.unbind(1):
                if not sick:  # the state moves on by itself, and the next observation is predicted
                    h = h + 0.1 * torch.tanh(self.drift(h))
                outs.append(self.head(h))
                h = self.cell(x_t, h)
            out = torch.stack(outs, 1)
            return out + 0 * self.drift(h).sum() if sick else out

    return M(), (floats(),), {}


@pair("HS402")
def prices_as_they_are(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.lstm(x if sick else (x - 3000) / 100)[0][:, -1])

    return M(), (3000 + 40 * torch.randn(4, 12, 2).cumsum(1),), {}


@pair("HS103")
def rows_and_steps_joined_before_the_layer(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.gru, self.head = nn.Linear(3, 4), nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            fed = self.project(x.flatten(0, 1))
            out, _ = self.gru(fed.unsqueeze(1) if sick else fed.view(len(x), -1, 4))
            return self.head(out.reshape(len(x), -1, 8)[:, -1])

    return M(), (floats(),), {}


@pair("HS301")
def tanh_of_a_cell_of_tanh(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), 8)
            for x_t in x.unbind(1):
                h = self.cell(x_t, h).tanh() if sick else self.cell(x_t, h)
            return self.head(h)

    return M(), (floats(),), {}


class LoopOfGates(nn.Module):
    """A gated loop that a forward writes out."""

    def __init__(self, squash):
        super().__init__()
        self.squash = squash
        self.update, self.reset, self.new = nn.Linear(11, 8), nn.Linear(11, 8), nn.Linear(11, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            both = torch.cat([x_t, h], 1)
            z, r = self.update(both), self.reset(both).sigmoid()
            z = self.squash(z)
            h = (1 - z) * torch.tanh(self.new(torch.cat([x_t, r * h], 1))) + z * h
        return self.head(h)


@pair("HS304")
def gate_in_a_loop_without_its_sigmoid(sick):
    return LoopOfGates((lambda z: z) if sick else torch.sigmoid), (floats(),), {}


@pair("HS304")
def gate_in_a_loop_that_is_rectified(sick):
    return LoopOfGates(torch.relu if sick else torch.sigmoid), (floats(),), {}


@pair("HS304")
def plain_product_with_a_state(sick):
    """A linear map times the state is how a multiplicative LSTM makes what its gates read, and no gate."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.by_input, self.by_state = nn.Linear(3, 8), nn.Linear(8, 8)
            self.gates, self.head = nn.Linear(11, 32), nn.Linear(8, 2)

        def forward(self, x):
            h = c = x.new_zeros(len(x), 8)
            for x_t in x.unbind(1):
                mixed = self.by_input(x_t) * (self.by_state(h) if sick else h) + self.by_state(h)
                i, f, g, o = self.gates(torch.cat([x_t, mixed], 1)).chunk(4, 1)
                c = (f if sick else f.sigmoid()) * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return self.head(h)

    return M(), (floats(),), {}


class Packed(nn.Module):
    """A list of sequences, packed."""

    def __init__(self, enforce_sorted):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 8), nn.Linear(8, 2)
        self.enforce_sorted = enforce_sorted

    def forward(self, sequences):
        return self.head(self.gru(pack_sequence(sequences, enforce_sorted=self.enforce_sorted))[1][-1])


@pair("HS111")
def list_of_sequences_in_any_order(sick):
    return Packed(sick), ([floats(steps, 3) for steps in (3, 7, 5)],), {}


@pair("HS111")
def list_of_two_sequences_of_one_length(sick):
    return Packed(sick), ([floats(6, 3) for _ in range(2)],), {}


@pair("HS109")
def tuple_of_sequences(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, num_layers=2), nn.Linear(8, 2)

        def forward(self, sequences):
            return self.head(self.gru(pack_sequence(sequences, enforce_sorted=False))[1][0 if sick else -1])

    return M(), (tuple(floats(steps, 3) for steps in (4, 6, 2)),), {}


@pair("HS103")
def list_of_steps(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(3, 8), nn.Linear(8, 2)

        def forward(self, steps):
            h = first = steps[0].new_zeros(len(steps[0]), 8)
            for x in steps:
                h = self.cell(x, first if sick else h)
            return self.head(h)

    return M(), ([floats(4, 3) for _ in range(6)],), {}
