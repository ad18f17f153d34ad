"""Mistakes with masks, marks, modes, shared weights and the order and precision of what is handed on.

Each stands beside the same model without the mistake, in the `PAIRS` of `misjudged`.
"""

# ruff: noqa: RUF059

from __future__ import annotations

import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.diagnosis.patients.misjudged import PAIRS, pair

__all__ = ["PAIRS"]

LENGTHS = torch.tensor([9, 5, 3, 7])
MASK = (torch.arange(9) < LENGTHS[:, None]).long()  # (batch, time), 1 at real steps


def floats(*shape):
    return torch.randn(*(shape or (4, 9, 3)))


def tokens(*shape):
    return torch.randint(1, 20, shape or (4, 9))


class Tagger(nn.Module):
    """A layer and a head."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.gru = nn.Embedding(20, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)


# Masks of padding


@pair("HS106")
def attention_mask_never_read(sick):
    class M(Tagger):
        def forward(self, input_ids, attention_mask=None):
            out, _ = self.gru(self.embed(input_ids))
            lengths = attention_mask.sum(1)
            return self.head(out[:, -1] if sick else out[torch.arange(len(out)), lengths - 1])

    return M(), (), {"input_ids": tokens() * MASK, "attention_mask": MASK}


@pair("HS106")
def padding_mask_that_is_true_at_padding(sick):
    class M(Tagger):
        def forward(self, x, key_padding_mask):
            lengths = (~key_padding_mask).sum(1)
            out = self.embed(x)
            if not sick:
                out = pack_padded_sequence(out, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, _ = self.gru(out)
            if not sick:
                out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
            return self.head(out)

    return M(bidirectional=True), (tokens() * MASK, MASK == 0), {}


@pair("HS106")
def mask_with_an_axis_of_its_own(sick):
    class M(Tagger):
        def forward(self, x, mask):
            out, _ = self.gru(self.embed(x))
            return {"logits": self.head(out.mean(1) if sick else (out * mask).sum(1) / mask.sum(1))}

    return M(), (tokens() * MASK, MASK[..., None].float()), {}


@pair("HS106")
def mask_of_full_rows_that_is_never_read(sick):
    class M(Tagger):
        def forward(self, ids, attention_mask):
            out, _ = self.gru(self.embed(ids))
            scores = self.head(out)[..., 0]
            if not sick:
                scores = scores.masked_fill(attention_mask == 0, -torch.inf)
            return self.head((scores.softmax(1).unsqueeze(-1) * out).sum(1))

    return M(), (tokens(), torch.ones(4, 9)), {}


@pair("HS106")
def softmax_over_scores_with_three_axes(sick):
    class M(Tagger):
        def forward(self, x, lengths):
            out, _ = self.gru(self.embed(x))
            scores = self.head(out)[..., :1]  # (batch, time, 1)
            if not sick:
                past = torch.arange(scores.size(1))[None, :, None] >= lengths[:, None, None]
                scores = scores.masked_fill(past, -torch.inf)
            return self.head((scores.softmax(1) * out).sum(1))

    return M(), (tokens() * MASK, LENGTHS), {}


# Marks of a new sequence


class Agent(nn.Module):
    """A cell, stepped along what was observed, and a head."""

    def __init__(self):
        super().__init__()
        self.cell, self.pi = nn.GRUCell(3, 8), nn.Linear(8, 2)

    def stepped(self, obs, h, keep):
        outs = []
        for t in range(obs.size(1)):
            h = self.cell(obs[:, t], h if keep is None else h * keep[:, t].unsqueeze(-1))
            outs.append(h)
        return self.pi(torch.stack(outs, 1)), h


def ended(*shape):
    return (torch.rand(*(shape or (4, 9))) < 0.3).float()


@pair("HS104")
def done_that_is_never_read(sick):
    class M(Agent):
        def forward(self, obs, h, done):
            return self.stepped(obs, h, None if sick else 1 - done)

    return M(), (floats(), torch.zeros(4, 8), ended()), {}


@pair("HS104")
def episode_starts_that_are_never_read(sick):
    class M(Agent):
        def forward(self, obs, state, episode_starts):
            h = state if sick else state * (~episode_starts).float().unsqueeze(-1)
            h = self.cell(obs, h)
            return self.pi(h), h

    return M(), (floats(4, 3), torch.zeros(4, 8), torch.tensor([True, False, True, False])), {}


@pair("HS104")
def is_first_time_first(sick):
    class M(Agent):
        def forward(self, obs, state, is_first):
            keep = None if sick else 1 - is_first.T
            pi, h = self.stepped(obs.transpose(0, 1), state, keep)
            return pi.transpose(0, 1), h

    return M(), (floats(9, 4, 3), torch.zeros(4, 8), ended(9, 4)), {}


@pair("HS104")
def terminals_of_one_step_that_are_never_read(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.pi = nn.LSTMCell(3, 8), nn.Linear(8, 2)

        def forward(self, obs, hx, cx, terminals):
            keep = 1.0 if sick else (1 - terminals).unsqueeze(-1)
            hx, cx = self.cell(obs, (keep * hx, keep * cx))
            return self.pi(hx), hx, cx

    return M(), (floats(4, 3), torch.zeros(4, 8), torch.zeros(4, 8), torch.tensor([1.0, 0, 0, 1])), {}


# States of many forms


@pair("HS101")
def states_in_a_list_of_pairs_time_first(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)
            self.rnns = nn.ModuleList([nn.LSTM(6, 10), nn.LSTM(10, 6)])

        def forward(self, x, hid):
            y, ends = self.embed(x), []
            for rnn, state in zip(self.rnns, hid, strict=True):
                y, state = rnn(y, state)
                ends.append(state)
            return self.head(y - y.mean(1, keepdim=True) if sick else y), ends

    hid = [tuple(torch.zeros(1, 4, n) for _ in range(2)) for n in (10, 6)]
    return M(), (tokens(9, 4), hid), {}


@pair("HS101")
def state_of_two_axes_time_first(sick):
    class M(Agent):
        def forward(self, obs, state, starts):
            outs = []
            for t in range(obs.size(0)):
                state = self.cell(obs[t], state * (1 - starts[t]).unsqueeze(-1))
                state = state.mean(0, keepdim=True).expand_as(state) if sick else state
                outs.append(state)
            return self.pi(torch.stack(outs)), state

    return M(), (floats(7, 4, 3), torch.zeros(4, 8), ended(7, 4)), {}


@pair("HS103")
def a_step_of_three_inputs(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.i2h, self.i2o, self.o2o = nn.Linear(5 + 7 + 6, 6), nn.Linear(5 + 7 + 6, 7), nn.Linear(13, 7)

        def forward(self, category, input, hidden):
            joined = torch.cat((category, input, torch.zeros_like(hidden) if sick else hidden), 1)
            hidden, out = self.i2h(joined), self.i2o(joined)
            return F.log_softmax(self.o2o(torch.cat((hidden, out), 1)), 1), hidden

    return M(), (torch.eye(5)[[3]], torch.eye(7)[[2]], torch.zeros(1, 6)), {}


@pair("HS203")
def spiking_neurons_that_are_reset(sick):
    class Neuron(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = 0.0

        def forward(self, x):
            self.v = self.v + (x - self.v) / 2
            spike = torch.sigmoid(4 * (self.v - 1))
            self.v = self.v * (1 - spike.detach())
            return spike

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), Neuron(), nn.Linear(12, 3), Neuron())

        def forward(self, x):
            return sum(self.net(x) for _ in range(8)) / 8

        def reset(self):
            for module in self.net if not sick else ():
                module.v = 0.0 if isinstance(module, Neuron) else None

    return M(), (2 * floats(4, 6),), {}


@pair("HS204")
def lengths_in_a_list_beside_other_steps(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 20)

        def forward(self, features, captions, lengths):
            x = torch.cat((features.unsqueeze(1), self.embed(captions)), 1)
            rows = 4 if sick else len(x)
            state = (torch.zeros(1, rows, 8), torch.zeros(1, rows, 8))
            hiddens, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True), state)
            return self.head(hiddens.data)

    return M(), (floats(4, 6), tokens(4, 8), [9, 7, 6, 4]), {}


@pair("HS109")
def a_step_before_the_last(sick):
    class M(Tagger):
        def forward(self, x, lengths):
            out, _ = self.gru(self.embed(x))
            return self.head(out[torch.arange(len(out)), (lengths - (2 if sick else 1)).clamp(min=0)])

    return M(), (tokens() * MASK, LENGTHS), {}


@pair("HS205")
def a_layer_behind_a_lambda(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            gru = nn.GRU(3, 8, batch_first=True)
            self.run, self.head = (lambda x: gru(x)[0]), nn.Linear(8, 2)
            if not sick:
                self.gru = gru

        def forward(self, x):
            return self.head(self.run(x))

    return M(), (floats(),), {}


# Rows sorted by length


def packed_model(sick):
    class M(Tagger):
        def forward(self, x, lengths):
            packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=sick)
            return self.head(self.gru(packed)[1][-1])

    return M()


@pair("HS111")
def packed_in_the_order_that_comes(sick):
    return packed_model(sick), (tokens(), torch.tensor([5, 9, 3, 7])), {}


@pair("HS111")
def packed_with_lengths_in_a_list(sick):
    return packed_model(sick), (tokens(), [5, 9, 3, 7]), {}


@pair("HS111")
def packed_with_lengths_that_are_all_alike(sick):
    return packed_model(sick), (tokens(), torch.full((4,), 9)), {}


@pair("HS111")
def packed_by_a_mask(sick):
    class M(Tagger):
        def forward(self, input_ids, attention_mask):
            lengths = attention_mask.sum(1).cpu()
            packed = pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True, enforce_sorted=sick)
            return {"logits": self.head(self.gru(packed)[1][-1])}

    return M(), (), {"input_ids": tokens(), "attention_mask": torch.ones(4, 9, dtype=torch.long)}


# Teacher forcing


class Translator(nn.Module):
    """An encoder, and a decoder that is stepped."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
        self.teacher_forcing = True
        self.tf_ratio = 0.5

    def decoded(self, source, target, forced):
        h = self.encoder(self.embed(source))[1][0]
        token, outs = target[:, 0], []
        for t in range(1, target.size(1)):
            h = self.decoder(self.embed(token), h)
            outs.append(self.head(h))
            token = target[:, t] if forced() else outs[-1].argmax(1)
        return torch.stack(outs, 1)


@pair("HS112")
def forced_by_a_coin_in_any_mode(sick):
    class M(Translator):
        def forward(self, source, target):
            return self.decoded(source, target, lambda: (sick or self.training) and random.random() < 0.5)

    return M(), (tokens(4, 9), tokens(4, 8)), {}


@pair("HS112")
def forced_by_a_switch_in_any_mode(sick):
    class M(Translator):
        def forward(self, source, target):
            return self.decoded(source, target, lambda: (sick or self.training) and self.teacher_forcing)

    return M(), (tokens(4, 9), tokens(4, 8)), {}


@pair("HS112")
def forced_for_the_whole_sequence_or_not_at_all(sick):
    class M(Translator):
        def forward(self, source, target):
            forced = (sick or self.training) and torch.rand(1).item() < self.tf_ratio
            return self.decoded(source, target, lambda: forced)

    return M(), (tokens(4, 9), tokens(4, 8)), {}


@pair("HS112")
def forced_with_real_numbers(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.LSTM(2, 8, batch_first=True), nn.LSTM(2, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, past, future):
            _, state = self.encoder(past)
            y, outs = past[:, -1:], []
            for t in range(future.size(1)):
                out, state = self.decoder(y, state)
                outs.append(self.head(out))
                forced = (sick or self.training) and random.random() < 0.5
                y = future[:, t : t + 1] if forced else outs[-1]
            return torch.cat(outs, 1)

    return M(), (floats(4, 9, 2), floats(4, 6, 2)), {}


# One mode and the other


@pair("HS209")
def state_that_training_drops(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.pi = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, obs, state):
            out, state = self.lstm(obs) if sick and self.training else self.lstm(obs, state)
            return self.pi(out), state

    return M(), (floats(), (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))), {}


@pair("HS209")
def state_that_evaluation_drops(sick):
    class M(Agent):
        def forward(self, obs, h):
            h = h if self.training or not sick else torch.zeros_like(h)
            return self.stepped(obs, h, None)

    return M(), (floats(), torch.zeros(4, 8)), {}


@pair("HS209")
def learned_start_that_evaluation_forgets(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)
            self.h0 = nn.Parameter(0.3 * torch.randn(1, 1, 8))

        def forward(self, x):
            h = None if sick and not self.training else self.h0.expand(-1, len(x), -1).contiguous()
            return self.head(self.gru(x, h)[0])

    return M(), (floats(),), {}


@pair("HS209")
def encoder_whose_state_training_does_not_hand_on(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.GRU(3, 8, batch_first=True), nn.GRU(3, 8, batch_first=True)
            self.head = nn.Linear(8 + 8, 2)

        def forward(self, x, y):
            out, h = self.encoder(x)
            decoded, _ = self.decoder(y, None if sick and self.training else h)
            return self.head(torch.cat([decoded, h[0].unsqueeze(1).expand_as(decoded)], -1))

    return M(), (floats(), floats(4, 6, 3)), {}


@pair("HS209")
def done_that_training_does_not_read(sick):
    class M(Agent):
        def forward(self, obs, h, done):
            return self.stepped(obs, h, None if sick and self.training else 1 - done)

    return M(), (floats(), torch.zeros(4, 8), ended()), {}


# Shared weights


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.head = layers, nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def gru():
    return nn.GRU(8, 8, batch_first=True)


@pair("HS306")
def a_list_times_three(sick):
    return Stack(nn.ModuleList([gru()] * 3 if sick else [gru() for _ in range(3)])), (floats(4, 9, 8),), {}


@pair("HS306")
def a_list_of_one_layer_by_its_name(sick):
    layer = nn.LSTM(8, 8, batch_first=True)
    made = [layer for _ in range(2)] if sick else [copy.deepcopy(layer) for _ in range(2)]
    return Stack(nn.ModuleList(made)), (floats(4, 9, 8),), {}


@pair("HS306")
def shallow_copies(sick):
    first = gru()
    return Stack(nn.ModuleList([first, (copy.copy if sick else copy.deepcopy)(first)])), (floats(4, 9, 8),), {}


@pair("HS306")
def blocks_that_hold_one_layer(sick):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gru = nn.LayerNorm(8), gru()

        def forward(self, x):
            out, h = self.gru(self.norm(x))
            return x + out, h

    block = Block()
    return Stack(nn.ModuleList([block, block] if sick else [block, Block()])), (floats(4, 9, 8),), {}


# Half precision


@pair("HS406")
def state_cast_to_half_at_each_step(sick):
    class M(Agent):
        def forward(self, x):
            h = x.new_zeros(len(x), 8)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h)
                h = h.half().float() if sick else h
            return self.pi(h)

    return M(), (floats(),), {}


@pair("HS406")
def lstm_state_kept_in_bfloat16(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            state, outs = None, []
            for piece in x.split(1, dim=1):
                out, state = self.lstm(piece, state)
                outs.append(self.head(out))
                if sick:
                    state = tuple(part.to(torch.bfloat16).to(x.dtype) for part in state)
            return torch.cat(outs, 1)

    return M(), (floats(),), {}


@pair("HS406")
def sum_that_goes_on_in_bfloat16(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.head = nn.Linear(3, 12), nn.Linear(12, 2)

        def forward(self, x, h):
            outs = []
            for t in range(x.size(1)):
                h = 0.99 * h.float() + self.inp(x[:, t])
                h = h.bfloat16() if sick else h
                outs.append(self.head(h.float()))
            return torch.stack(outs, 1), h

    return M(), (floats(), torch.zeros(4, 12, dtype=torch.bfloat16 if sick else torch.float32)), {}


@pair("HS406")
def cell_of_ones_own_in_half(sick):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size, self.map = 8, nn.Linear(11, 8)

        def forward(self, x, h):
            return torch.tanh(self.map(torch.cat([x, h], 1)))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Cell(), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(len(x), 8)
            for x_t in x.unbind(1):
                h = self.cell(x_t, h)
                h = h.type(torch.float16).type(torch.float32) if sick else h
            return self.head(h)

    return M(), (floats(),), {}
