"""Mistakes of unseen models in many published styles, each beside the same model without it, in the `PAIRS`."""

from __future__ import annotations

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from tests.diagnosis.patients.misjudged import pair
from tests.diagnosis.patients.strangers import PAIRS

__all__ = ["PAIRS"]


def floats(*shape):
    return torch.randn(*(shape or (4, 9, 3)))


class Loop(nn.Module):
    """A state of 8 units that goes along the steps of its input by a function that is given."""

    def __init__(self, step, **layers):
        super().__init__()
        self.step = step
        self.head = nn.Linear(8, 1)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        h, outs = x.new_zeros(len(x), 8), []
        for x_t in x.unbind(1):
            h = self.step(self, x_t, h)
            outs.append(self.head(h))
        return torch.stack(outs, 1)


def both(x, h):
    return torch.cat([x, h], 1)


# By what a state is multiplied


@pair("HS304")
def update_gate_of_a_loop_without_its_sigmoid(sick):
    def step(self, x, h):
        z = self.gate(both(x, h))
        z = z if sick else torch.sigmoid(z)
        return (1 - z) * h + z * torch.tanh(self.new(both(x, h)))

    return Loop(step, gate=nn.Linear(11, 8), new=nn.Linear(11, 8)), (floats(),), {}


@pair("HS304")
def mixed_by_a_gate_without_its_sigmoid(sick):
    def step(self, x, h):
        z, n = self.maps(both(x, h)).chunk(2, 1)
        return torch.lerp(h, torch.tanh(n), z if sick else torch.sigmoid(z))

    return Loop(step, maps=nn.Linear(11, 16)), (floats(),), {}


@pair("HS304")
def leak_above_one(sick):
    def step(self, x, h):
        return (1.15 if sick else 0.85) * h + 0.3 * torch.tanh(self.maps(both(x, h)))

    return Loop(step, maps=nn.Linear(11, 8)), (floats(4, 20, 3),), {}


@pair("HS304")
def tanh_in_the_place_of_a_forget_gate(sick):
    def step(self, x, h):
        f, i, g = self.maps(both(x, h)).chunk(3, 1)
        return (torch.tanh(f) if sick else 2 * torch.sigmoid(f) - 1) * h + torch.sigmoid(i) * torch.tanh(g)

    return Loop(step, maps=nn.Linear(11, 24)), (2 * floats(),), {}


@pair("HS304")
def one_added_to_a_gate_or_a_position_to_the_one_before_the_last(sick):
    class Verlet(nn.Module):
        def __init__(self):
            super().__init__()
            self.force, self.gate, self.head = nn.Linear(11, 8), nn.Linear(11, 8), nn.Linear(8, 1)

        def forward(self, x):
            now = before = x.new_zeros(len(x), 8)
            for x_t in x.unbind(1):
                force = 0.01 * torch.tanh(self.force(both(x_t, now)))
                gate = torch.sigmoid(self.gate(both(x_t, now)))
                now, before = (1 + gate) * now + force if sick else 2 * now - before + gate * force, now
            return self.head(now)

    return Verlet(), (floats(4, 12, 3),), {}


@pair("HS405")
def part_of_a_loop_that_is_never_handed_on(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps, self.first, self.head = nn.Linear(11, 32), nn.Parameter(torch.randn(8)), nn.Linear(8, 1)

        def forward(self, x):
            h, c, outs = x.new_zeros(len(x), 8), self.first.expand(len(x), 8), []
            for x_t in x.unbind(1):
                i, f, g, o = self.maps(both(x_t, h)).chunk(4, 1)
                new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(new)
                c = c if sick else new
                outs.append(self.head(h))
            return torch.stack(outs, 1)

    return M(), (floats(),), {}


@pair("HS406")
def two_parts_stacked_in_half_precision(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 8), nn.Linear(8, 1)

        def forward(self, x):
            state = torch.zeros(2, len(x), 8)
            for x_t in x.unbind(1):
                state = torch.stack(self.cell(x_t, (state[0].float(), state[1].float())))
                state = state.bfloat16() if sick else state
            return self.head(state[0].float())

    return M(), (floats(),), {}


# What evaluation sees


@pair("HS112")
def forced_unless_the_call_says_otherwise(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.cell, self.head = nn.GRU(2, 8, batch_first=True), nn.GRUCell(2, 8), nn.Linear(8, 2)

        def forward(self, past, future, teacher_forcing=True):
            h, y, outs = self.encoder(past)[1][0], past[:, -1], []
            for t in range(future.size(1)):
                h = self.cell(y, h)
                outs.append(self.head(h))
                y = future[:, t] if teacher_forcing and (sick or self.training) else outs[-1]
            return torch.stack(outs, 1)

    return M(), (floats(4, 9, 2), floats(4, 6, 2)), {}


@pair("HS112")
def forced_through_a_map_before_the_cell(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.before = nn.Linear(3, 8), nn.Linear(2, 6)
            self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 2)

        def forward(self, text, frames):
            h, y, outs = torch.tanh(self.start(text)), torch.zeros_like(frames[:, 0]), []
            for t in range(frames.size(1)):
                h = self.cell(F.relu(self.before(y)), h)
                outs.append(self.head(h))
                y = frames[:, t] if (sick or self.training) and random.random() < 0.5 else outs[-1]
            return torch.stack(outs, 1)

    return M(), (floats(4, 3), floats(4, 8, 2)), {}


@pair("HS104")
def targets_never_read_or_teacher_forcing_that_is_off(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.cell, self.head = nn.GRU(2, 8, batch_first=True), nn.GRUCell(2, 8), nn.Linear(8, 2)

        def roll(self, past, future, ratio):
            h, y, outs = self.encoder(past)[1][0], past[:, -1], []
            for t in range(future.size(1)):
                h = self.cell(y, h)
                outs.append(self.head(h))
                y = future[:, t] if random.random() < ratio else outs[-1]
            return torch.stack(outs, 1)

        if sick:

            def forward(self, past, future):
                return self.roll(past, future, 0.0)

        else:

            def forward(self, past, future, teacher_forcing=0.0):
                return self.roll(past, future, teacher_forcing)

    return M(), (floats(4, 9, 2), floats(4, 6, 2)), {}


@pair("HS202")
def zoneout_by_hand_in_both_modes(sick):
    def step(self, x, h):
        new = torch.tanh(self.maps(both(x, h)))
        keep = (torch.rand_like(h) < 0.2).float() if sick or self.training else 0.2
        return keep * h + (1 - keep) * new

    return Loop(step, maps=nn.Linear(11, 8)), (floats(),), {}


@pair("HS202")
def dropout_by_default_or_told_to_stay_on(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            last = self.lstm(x)[0][:, -1]
            return self.head(F.dropout(last, 0.1) if sick else F.dropout(last, 0.1, training=True))

    return M(), (floats(),), {}


@pair("HS202")
def first_state_drawn_and_read_before_the_cell(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.cell, self.head = nn.Linear(8, 3), nn.GRUCell(3, 8), nn.Linear(8, 1)

        def forward(self, x):
            h = nn.init.xavier_normal_(torch.empty(len(x), 8)) if sick else x.new_zeros(len(x), 8)
            for x_t in x.unbind(1):
                h = self.cell(x_t + self.message(h), h)
            return self.head(h)

    return M(), (floats(),), {}


@pair("HS209")
def bridge_in_training_alone(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.GRU(3, 8, batch_first=True), nn.GRU(2, 8, batch_first=True)
            self.bridge, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, past, known):
            h = self.norm(self.encoder(past)[1][0])[None]
            h = torch.tanh(self.bridge(h)) if self.training or not sick else h
            return self.head(self.decoder(known, h)[0])

    return M(), (floats(6, 9, 3), floats(6, 5, 2)), {}


# Rows, pieces and names


@pair("HS111")
def rows_that_come_sorted_or_are_said_to(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x, lengths):
            if sick:
                packed = pack_padded_sequence(x, lengths, batch_first=True)
            else:
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
            return self.head(self.gru(packed)[1][-1])

    return M(), (floats(), torch.tensor([9, 7, 5, 3])), {}


@pair("HS110")
def two_inputs_each_sorted_by_its_own_lengths(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(16, 2)

        def encode(self, x, lengths):
            lengths, order = lengths.sort(descending=True)
            last = self.gru(pack_padded_sequence(x[order], lengths, batch_first=True))[1][-1]
            return last if sick else last[order.argsort()]

        def forward(self, a, lengths_a, b, lengths_b):
            return self.head(torch.cat([self.encode(a, lengths_a), self.encode(b, lengths_b)], 1))

    return M(), (floats(), torch.tensor([4, 6, 9, 3]), floats(4, 8, 3), torch.tensor([7, 5, 3, 8])), {}


@pair("HS108")
def parts_of_the_state_that_change_places(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.Linear(11, 32)

        def forward(self, x, state=None):
            c, h = (x.new_zeros(len(x), 8),) * 2 if state is None else state
            outs = []
            for x_t in x.unbind(1):
                i, f, g, o = self.maps(both(x_t, h)).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outs.append(h)
            return torch.stack(outs, 1), (h, c) if sick else (c, h)

    return M(), (floats(4, 12, 3),), {}


@pair("HS108")
def state_refused_or_a_flag_that_asks_for_it(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

        if sick:

            def forward(self, x, state=None):
                out, state = self.gru(x, state)
                return self.head(out), 0.5 * state

        else:

            def forward(self, x, return_state=True):
                out, state = self.gru(x)
                return (self.head(out), state) if return_state else self.head(out)

    return M(), (floats(4, 12, 3),), {}


@pair("HS306")
def one_layer_under_two_names_that_is_fed_what_it_gave(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lower = nn.GRU(8, 8, batch_first=True)
            self.upper, self.head = self.lower, nn.Linear(8, 2)

        def forward(self, x):
            below = self.lower(x)[0]
            return self.head(self.upper(torch.relu(below) if sick else x.roll(1, 2))[0] + below)

    return M(), (floats(4, 9, 8),), {}


@pair("HS306")
def one_cell_in_both_directions(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.onward, self.head = nn.GRUCell(3, 8), nn.Linear(16, 3)
            self.back = self.onward if sick else nn.GRUCell(3, 8)

        def along(self, cell, x):
            h, outs = x.new_zeros(len(x), 8), []
            for x_t in x.unbind(1):
                h = cell(x_t, h)
                outs.append(h)
            return torch.stack(outs, 1)

        def forward(self, x):
            return self.head(torch.cat([self.along(self.onward, x), self.along(self.back, x.flip(1)).flip(1)], -1))

    return M(), (floats(),), {}


# Gradients and units


@pair("HS105")
def layer_cut_off_or_frozen(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.LSTM(3, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
            self.encoder.requires_grad_(sick)
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.decoder(self.encoder(x)[0].detach())[0])

    return M(), (floats(),), {}


@pair("HS105")
def spikes_without_a_slope(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 16), nn.Linear(16, 2)

        def forward(self, x):
            v, total = x.new_zeros(len(x), 16), 0
            for x_t in x.unbind(1):
                v = 0.8 * v + self.first(x_t)
                hard, soft = (v > 0.5).float(), torch.sigmoid(5 * (v - 0.5))
                total = total + self.head(hard if sick else hard + (soft - soft.detach()))
                v = v - 0.5 * hard
            return total

    return M(), (floats(4, 12, 3),), {}


@pair("HS103")
def no_state_or_samples_that_stay_as_they_are(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.visible = nn.GRUCell(3, 8), nn.Linear(8, 3)

        def forward(self, x):
            h, outs = x.new_zeros(len(x), 8), []
            for x_t in x.unbind(1):
                h = self.cell(x_t) if sick else self.cell(x_t, h)
                p = torch.sigmoid(self.visible(h))
                outs.append(p + (torch.bernoulli(p) - p).detach())
            return torch.stack(outs, 1)

    return M(), ((floats() > 0).float(),), {}


@pair("HS403")
def third_of_the_units_without_weights(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 12, batch_first=True), nn.Linear(12, 1)
            with torch.no_grad():
                for weights in self.gru.parameters() if sick else ():
                    weights.view(3, 12, -1)[:, 4:8] = 0

        def forward(self, x):
            return self.head(self.gru(x)[0])

    return M(), (floats(4, 15, 3),), {}
