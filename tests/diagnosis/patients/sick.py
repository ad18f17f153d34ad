"""Sick models, each with one mistake that people make, written as they write it.

`SICK` maps a name to the codes of which at least one has to be found, the first being the best, and a function that
returns what `hs.diagnose` is called with: `(model, inputs, options)`.
"""

# People leave names unused; that is part of many a mistake.
# ruff: noqa: F841, RUF059

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
SICK: dict[str, tuple[tuple[str, ...], Callable[[], Case]]] = {}

B, T, F_IN, H, V = 5, 9, 3, 8, 20


def sick(*codes: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def note(fn: Callable[[], Case]) -> Callable[[], Case]:
        SICK[fn.__name__.replace("_", " ")] = (codes, fn)
        return fn

    return note


def floats(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, T, F_IN)))


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, V, shape or (B, T))


class Model(nn.Module):
    """What most of these share: a layer and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True, **options}
        self.lstm = nn.LSTM(F_IN, H, **options)
        self.fc = nn.Linear(H * (2 if options.get("bidirectional") else 1), 4)


# Rows


@sick("HS101")
def batch_first_forgotten_last_step():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    return M(batch_first=False), (floats(),), {}


@sick("HS101")
def batch_first_forgotten_tagger():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    return M(batch_first=False, num_layers=2), (floats(),), {}


@sick("HS101")
def batch_first_forgotten_hidden_state():
    class M(Model):
        def forward(self, x):
            _, (h, _) = self.lstm(x)
            return self.fc(h[-1])

    return M(batch_first=False), (floats(),), {}


@sick("HS101")
def batch_first_forgotten_with_as_many_rows_as_steps():
    class M(Model):
        def forward(self, x):
            _, (h, _) = self.lstm(x)
            return self.fc(h[-1])

    return M(batch_first=False), (floats(7, 7, F_IN),), {}


@sick("HS101")
def batch_first_given_time_first_data():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out)

    return M(), (floats(T, B, F_IN),), {"batch_axis": 1}


@sick("HS101")
def view_instead_of_transpose():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.lstm = nn.LSTM(6, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            e = self.emb(x).view(x.size(1), x.size(0), -1)
            _, (h, _) = self.lstm(e)
            return self.fc(h[-1])

    return M(), (tokens(),), {}


@sick("HS101")
def reshape_back_instead_of_transpose():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x.transpose(0, 1))
            return self.fc(out.reshape(x.size(0), x.size(1), -1))

    return M(batch_first=False), (floats(),), {}


@sick("HS101")
def softmax_over_the_batch():
    class M(Model):
        def forward(self, x):
            return F.softmax(self.fc(self.lstm(x)[1][0][-1]), dim=0)

    return M(), (floats(),), {}


@sick("HS101")
def normalized_over_the_batch():
    class M(Model):
        def forward(self, x):
            x = (x - x.mean(0)) / (x.std(0) + 1e-6)
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (floats(),), {}


@sick("HS101")
def attention_over_the_batch():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.attn = nn.Linear(H, 1)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            out, _ = self.lstm(x)
            w = torch.softmax(self.attn(out), dim=0)
            return self.fc((w * out).sum(1))

    return M(), (floats(),), {}


@sick("HS109", "HS101")
def hidden_state_viewed_instead_of_transposed():
    class M(Model):
        def forward(self, x):
            _, (h, _) = self.lstm(x)
            return self.fc(h.view(x.size(0), -1))

    return M(bidirectional=True), (floats(),), {}


@sick("HS109", "HS101")
def last_row_instead_of_last_step():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[-1])

    return M(), (floats(),), {}


@sick("HS101")
def state_of_the_first_row_for_all():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(F_IN, H, batch_first=True)
            self.decoder = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, F_IN)

        def forward(self, x):
            _, h = self.encoder(x)
            h = h[:, :1].expand(-1, x.size(0), -1).contiguous()
            out, _ = self.decoder(x, h)
            return self.fc(out)

    return M(), (floats(),), {}


@sick("HS110")
def sorted_by_length_and_never_put_back():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order], lengths, batch_first=True)
            _, h = self.gru(packed)
            return self.fc(h[-1])

    lengths = torch.tensor([4, 9, 2, 7, 5])
    return M(), (floats(), lengths), {"lengths": lengths}


@sick("HS110")
def never_put_back_seen_on_sorted_data():
    model, (x, lengths), _ = SICK["sorted by length and never put back"][1]()
    lengths = lengths.sort(descending=True).values
    return model, (x, lengths), {"lengths": lengths}


@sick("HS110")
def sorted_twice_instead_of_put_back():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, lengths):
            lengths, order = torch.sort(lengths, descending=True)
            packed = pack_padded_sequence(x[order], lengths, batch_first=True)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.fc(out[order])

    lengths = torch.tensor([4, 9, 2, 7, 5])
    return M(), (floats(), lengths), {"lengths": lengths}


# Time


@sick("HS102")
def softmax_over_time():
    class M(Model):
        def forward(self, x):
            return F.softmax(self.fc(self.lstm(x)[0]), dim=1)

    return M(), (floats(),), {}


@sick("HS102")
def normalized_over_the_whole_sequence():
    class M(Model):
        def forward(self, x):
            x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            return self.fc(self.lstm(x)[0])

    return M(), (floats(),), {}


@sick("HS102")
def centered_over_time_beside_a_flip_of_features():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRU(F_IN, H, batch_first=True)
            self.b = nn.GRU(H, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x):
            out, _ = self.b(self.a(x.flip(2))[0])
            return self.fc(out - out.mean(1, keepdim=True))

    return M(), (floats(),), {}


@sick("HS102")
def last_state_added_to_every_step():
    class M(Model):
        def forward(self, x):
            out, (h, _) = self.lstm(x)
            return self.fc(out + h[-1].unsqueeze(1))

    return M(), (floats(),), {}


@sick("HS102")
def input_rolled_the_wrong_way():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(torch.roll(x, -1, dims=1))[0])

    return M(), (floats(),), {}


@sick("HS103")
def hidden_state_made_anew_at_each_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            for t in range(x.size(1)):
                h = torch.zeros(x.size(0), H)
                h = self.cell(x[:, t], h)
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS103")
def hidden_state_made_anew_under_mean_pooling():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            outs = []
            for t in range(x.size(1)):
                h, c = self.cell(x[:, t])
                outs.append(h)
            return self.fc(torch.stack(outs).mean(0))

    return M(), (floats(),), {}


@sick("HS103")
def layer_called_step_by_step_without_its_state():
    class M(Model):
        def forward(self, x):
            outs = []
            for t in range(x.size(1)):
                out, _ = self.lstm(x[:, t : t + 1])
                outs.append(out)
            return self.fc(torch.cat(outs, 1))

    return M(), (floats(),), {}


@sick("HS103")
def cell_state_never_handed_on():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), H)
            c0 = torch.zeros(x.size(0), H)
            for t in range(x.size(1)):
                h, c = self.cell(x[:, t], (h, c0))
            return self.fc(h)

    return M(), (floats(),), {}


class OwnCell(nn.Module):
    """A cell by hand that forgets something."""

    def __init__(self, input_size: int = F_IN, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.i2h = nn.Linear(input_size, hidden_size)
        self.h2h = nn.Linear(hidden_size, hidden_size)


@sick("HS103")
def recurrent_term_forgotten():
    class Cell(OwnCell):
        def forward(self, x, h):
            return torch.tanh(self.i2h(x))

    return Cell(), (), {}


@sick("HS103")
def recurrent_term_forgotten_in_a_model():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = H
            self.W_xh = nn.Parameter(torch.randn(F_IN, H) * 0.3)
            self.W_hh = nn.Parameter(torch.randn(H, H) * 0.3)
            self.out = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), H)
            ys = []
            for t in range(x.size(1)):
                h_new = torch.tanh(x[:, t] @ self.W_xh)
                ys.append(self.out(h_new))
            return torch.stack(ys, 1)

    return RNN(), (floats(),), {}


@sick("HS103", "HS108")
def state_taken_and_not_passed_on():
    class M(Model):
        def forward(self, x, hidden):
            out, hidden = self.lstm(x)
            return self.fc(out), hidden

    return M(), (floats(), (torch.zeros(1, B, H), torch.zeros(1, B, H))), {}


@sick("HS104")
def input_term_forgotten():
    class Cell(OwnCell):
        def forward(self, x, h):
            return torch.tanh(self.h2h(h))

    return Cell(), (), {}


@sick("HS104")
def zeros_fed_instead_of_the_input():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(torch.zeros_like(x))
            return self.fc(out[:, -1])

    return M(), (floats(),), {}


@sick("HS104")
def siamese_that_reads_one_input_twice():
    class M(Model):
        def forward(self, a, b):
            u = self.lstm(a)[1][0][-1]
            v = self.lstm(a)[1][0][-1]
            return self.fc(u * v)

    return M(), (floats(), floats()), {}


@sick("HS105")
def detached_inside_the_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), H)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h.detach())
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS105")
def data_taken_inside_the_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = c = torch.zeros(x.size(0), H)
            outs = []
            for t in range(x.size(1)):
                h, c = self.cell(x[:, t], (h.data, c.data))
                outs.append(self.fc(h))
            return torch.stack(outs, 1)

    return M(), (floats(),), {}


@sick("HS105")
def detached_inside_the_cell():
    class Cell(OwnCell):
        def forward(self, x, h):
            return torch.tanh(self.i2h(x) + self.h2h(h.detach()))

    return Cell(), (), {}


@sick("HS105")
def outputs_wrapped_in_a_new_tensor():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return torch.tensor(self.fc(out[:, -1]).detach().numpy())

    return M(), (floats(),), {}


@sick("HS105")
def detached_by_hand_without_a_cell():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = H
            self.i2h = nn.Linear(F_IN + H, H)
            self.out = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), self.hidden_size)
            for t in range(x.size(1)):
                h = torch.tanh(self.i2h(torch.cat([x[:, t], h.detach()], 1)))
            return self.out(h)

    return RNN(), (floats(),), {}


# Padding and slices


def padded() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([4, 9, 2, 7, 5])
    return floats() * (torch.arange(T) < lengths.unsqueeze(1)).unsqueeze(-1), lengths


@sick("HS106")
def last_column_of_padded_rows():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    x, lengths = padded()
    return M(), (x,), {"lengths": lengths}


@sick("HS106")
def lengths_taken_and_not_used():
    class M(Model):
        def forward(self, x, lengths):
            _, (h, _) = self.lstm(x)
            return self.fc(h[-1])

    x, lengths = padded()
    return M(), (x, lengths), {"lengths": lengths}


@sick("HS106")
def mean_over_padding():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6, padding_idx=0)
            self.gru = nn.GRU(6, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            return self.fc(self.gru(self.emb(x))[0].mean(1))

    lengths = torch.tensor([4, 9, 2, 7, 5])
    return M(), (tokens().masked_fill(torch.arange(T) >= lengths.unsqueeze(1), 0),), {"lengths": lengths}


@sick("HS106")
def bidirectional_tagger_without_packing():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    x, lengths = padded()
    return M(bidirectional=True), (x,), {"lengths": lengths}


class FlippedByHand(nn.Module):
    """The reverse layer of a short row begins with its padding."""

    def __init__(self):
        super().__init__()
        self.fwd = nn.GRU(F_IN, H, batch_first=True)
        self.bwd = nn.GRU(F_IN, H, batch_first=True)
        self.fc = nn.Linear(2 * H, 3)

    def forward(self, x, lengths=None):
        back, _ = self.bwd(x.flip(1))
        return self.fc(torch.cat([self.fwd(x)[0], back.flip(1)], -1))


@sick("HS106")
def padding_flipped_to_the_front():
    x, lengths = padded()
    return FlippedByHand(), (x,), {"lengths": lengths, "call": lambda model, x: model(x)}


@sick("HS106")
def padding_flipped_to_the_front_though_lengths_are_told():
    x, lengths = padded()
    return FlippedByHand(), (x, lengths), {}


@sick("HS106")
def last_column_after_unpacking():
    class M(Model):
        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.fc(out[:, -1])

    x, lengths = padded()
    return M(), (x, lengths), {"lengths": lengths}


@sick("HS106")
def attention_without_a_mask():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.attn = nn.Linear(H, 1)
            self.fc = nn.Linear(H, 2)

        def forward(self, x, lengths):
            out, _ = self.lstm(x)
            w = self.attn(out).softmax(1)
            return self.fc((w * out).sum(1))

    x, lengths = padded()
    return M(), (x, lengths), {"lengths": lengths}


@sick("HS106")
def loss_that_counts_padding():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    x, lengths = padded()
    y = torch.randint(4, (B, T))
    return M(), (x,), {"lengths": lengths, "targets": y, "loss": lambda o, t: F.cross_entropy(o.transpose(1, 2), t)}


@sick("HS107")
def last_step_of_a_bidirectional_output():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(torch.relu(out[:, -1, :]))

    return M(bidirectional=True, num_layers=2), (floats(),), {}


@sick("HS107")
def last_step_of_a_bidirectional_output_time_first():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0][-1])

    return M(bidirectional=True, batch_first=False), (floats(T, B, F_IN),), {"batch_axis": 1}


@sick("HS107")
def last_valid_step_of_a_bidirectional_output():
    class M(Model):
        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.fc(out[torch.arange(len(x)), lengths - 1])

    x, lengths = padded()
    return M(bidirectional=True), (x, lengths), {"lengths": lengths}


@sick("HS109")
def cell_state_instead_of_hidden_state():
    class M(Model):
        def forward(self, x):
            out, hidden = self.lstm(x)
            return self.fc(hidden[1][-1])

    return M(), (floats(),), {}


@sick("HS109")
def unpacked_in_the_wrong_order():
    class M(Model):
        def forward(self, x):
            _, (c, h) = self.lstm(x)
            return self.fc(h.squeeze(0))

    return M(), (floats(),), {}


@sick("HS109")
def first_layer_instead_of_last():
    class M(Model):
        def forward(self, x):
            _, (h, _) = self.lstm(x)
            return self.fc(h[0])

    return M(num_layers=2), (floats(),), {}


@sick("HS109")
def one_direction_of_two():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            _, h = self.gru(x)
            return self.fc(h[-1])

    return M(), (floats(),), {}


@sick("HS109")
def first_step_instead_of_last():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, 0])

    return M(), (floats(),), {}


@sick("HS109")
def state_swapped_in_the_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), H)
            c = torch.zeros(x.size(0), H)
            for t in range(x.size(1)):
                c, h = self.cell(x[:, t], (h, c))
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS108")
def returns_the_state_it_was_given():
    class M(Model):
        def forward(self, x, hidden=None):
            if hidden is None:
                hidden = (torch.zeros(1, x.size(0), H), torch.zeros(1, x.size(0), H))
            out, _ = self.lstm(x, hidden)
            return self.fc(out), hidden

    return M(), (floats(),), {}


@sick("HS108")
def returns_its_state_in_the_wrong_order():
    class M(Model):
        def forward(self, x, state=None):
            out, (h, c) = self.lstm(x, state)
            return self.fc(out), (c, h)

    return M(), (floats(),), {}


# From call to call


@sick("HS203", "HS201")
def hidden_state_kept_with_its_graph():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.hidden = None

        def forward(self, x):
            out, self.hidden = self.lstm(x, self.hidden)
            return self.fc(out)

    return M(), (floats(),), {}


@sick("HS201")
def hidden_state_kept_and_never_reset():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.hidden = (torch.zeros(1, B, H), torch.zeros(1, B, H))

        def forward(self, x):
            out, hidden = self.lstm(x, self.hidden)
            self.hidden = tuple(h.detach() for h in hidden)
            return self.fc(out[:, -1])

    return M(), (floats(),), {}


@sick("HS202")
def random_initial_state():
    class M(Model):
        def forward(self, x):
            h0 = torch.randn(1, x.size(0), H)
            c0 = torch.randn(1, x.size(0), H)
            out, _ = self.lstm(x, (h0, c0))
            return self.fc(out[:, -1])

    return M(), (floats(),), {}


@sick("HS202")
def random_initial_state_from_numpy():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = torch.from_numpy(np.random.randn(x.size(0), H)).float()
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h)
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS202")
def functional_dropout_that_never_rests():
    class M(Model):
        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(F.dropout(out[:, -1], 0.5))

    return M(), (floats(),), {}


@sick("HS204")
def batch_size_written_down():
    class M(Model):
        def forward(self, x):
            h0 = torch.zeros(1, B, H)
            out, _ = self.lstm(x, (h0, h0))
            return self.fc(out[:, -1])

    return M(), (floats(),), {}


@sick("HS204")
def squeezed_batch_of_one():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 1)

        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1]).squeeze()

    return M(), (floats(),), {}


@sick("HS205")
def cells_in_a_plain_list():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = [nn.LSTMCell(F_IN, H), nn.LSTMCell(H, H)]
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            states = [(torch.zeros(len(x), H), torch.zeros(len(x), H)) for _ in self.cells]
            for t in range(x.size(1)):
                inp = x[:, t]
                for i, cell in enumerate(self.cells):
                    states[i] = cell(inp, states[i])
                    inp = states[i][0]
            return self.fc(inp)

    return M(), (floats(),), {}


@sick("HS205")
def heads_in_a_plain_dict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.heads = {"a": nn.Linear(H, 2), "b": nn.Linear(H, 3)}

        def forward(self, x):
            out, _ = self.gru(x)
            return {name: head(out) for name, head in self.heads.items()}

    return M(), (floats(),), {}


@sick("HS205")
def zeros_in_a_plain_attribute():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.h0 = torch.zeros(1, 1, H)

        def forward(self, x):
            h0 = self.h0.expand(-1, x.size(0), -1).contiguous()
            out, _ = self.lstm(x, (h0, h0))
            return self.fc(out[:, -1])

    return M(), (floats(),), {}


@sick("HS206")
def learned_state_that_is_no_parameter():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.h0 = torch.randn(1, 1, H, requires_grad=True)
            self.c0 = torch.randn(1, 1, H, requires_grad=True)

        def forward(self, x):
            state = tuple(s.expand(-1, x.size(0), -1).contiguous() for s in (self.h0, self.c0))
            return self.fc(self.lstm(x, state)[0][:, -1])

    return M(), (floats(),), {}


@sick("HS206")
def learned_state_that_is_detached():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.init_h = nn.Parameter(torch.zeros(1, 1, H))

        def forward(self, x):
            h0 = self.init_h.data.repeat(1, x.size(0), 1)
            return self.fc(self.lstm(x, (h0, torch.zeros_like(h0)))[0][:, -1])

    return M(), (floats(),), {}


@sick("HS206")
def learned_state_that_the_optimizer_does_not_know():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.h0 = nn.Parameter(torch.zeros(1, 1, H))

        def forward(self, x):
            h0 = self.h0.expand(-1, x.size(0), -1).contiguous()
            return self.fc(self.lstm(x, (h0, torch.zeros_like(h0)))[0][:, -1])

    model = M()
    params = [*model.lstm.parameters(), *model.fc.parameters()]
    return model, (floats(),), {"optimizer": torch.optim.Adam(params)}


@sick("HS207")
def state_changed_in_place():
    class M(Model):
        def forward(self, x, hidden):
            h, c = hidden
            h *= 0.9
            out, hidden = self.lstm(x, (h, c))
            return self.fc(out), hidden

    return M(), (floats(), (torch.ones(1, B, H), torch.ones(1, B, H))), {}


@sick("HS207")
def input_normalized_in_place():
    class M(Model):
        def forward(self, x):
            x -= 0.5
            x /= 2
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (floats(),), {}


@sick("HS207")
def cell_that_writes_into_its_state():
    class Cell(OwnCell):
        def forward(self, x, h):
            h += self.i2h(x)
            return torch.tanh(self.h2h(h))

    return Cell(), (), {}


# Cells


@sick("HS301")
def tanh_of_tanh():
    class Cell(OwnCell):
        def forward(self, x, h):
            h = torch.tanh(self.i2h(x) + self.h2h(h))
            return torch.tanh(h)

    return Cell(), (), {}


class OwnLSTM(nn.Module):
    """An LSTM by hand, to be spoiled."""

    def __init__(self, input_size: int = F_IN, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.gates = nn.Linear(input_size + hidden_size, 4 * hidden_size)


@sick("HS301")
def sigmoid_of_sigmoid():
    class Cell(OwnLSTM):
        def forward(self, x, state):
            h, c = state
            i, f, g, o = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            return h, (h, c)

    return Cell(), (), {}


@sick("HS301")
def softmax_before_cross_entropy():
    class M(Model):
        def forward(self, x):
            return torch.softmax(self.fc(self.lstm(x)[0][:, -1]), dim=-1)

    return M(), (floats(),), {"targets": torch.randint(4, (B,)), "loss": nn.CrossEntropyLoss()}


@sick("HS302")
def output_gate_never_used():
    class Cell(OwnLSTM):
        def forward(self, x, state):
            h, c = state
            i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.tanh(c)
            return h, (h, c)

    return Cell(), (), {}


@sick("HS302", "HS503")
def reset_gate_computed_and_dropped():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = F_IN, H
            self.z, self.r, self.n = (nn.Linear(F_IN + H, H) for _ in range(3))

        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = torch.sigmoid(self.z(xh))
            r = torch.sigmoid(self.r(xh))
            n = torch.tanh(self.n(torch.cat([x, h], 1)))
            return (1 - z) * n + z * h

    return Cell(), (), {}


@sick("HS303", "HS302")
def one_weight_for_two_gates():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = F_IN, H
            self.wi, self.wf, self.wg, self.wo = (nn.Linear(F_IN + H, H) for _ in range(4))

        def forward(self, x, state):
            h, c = state
            xh = torch.cat([x, h], 1)
            i = torch.sigmoid(self.wi(xh))
            f = torch.sigmoid(self.wi(xh))
            o = torch.sigmoid(self.wo(xh))
            c = f * c + i * torch.tanh(self.wg(xh))
            h = o * torch.tanh(c)
            return h, (h, c)

    return Cell(), (), {}


@sick("HS304")
def sigmoid_forgotten_on_the_forget_gate():
    class Cell(OwnLSTM):
        def forward(self, x, state):
            h, c = state
            i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = f * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            return h, (h, c)

    return Cell(), (), {}


@sick("HS304")
def tanh_forgotten_on_the_cell_state():
    class Cell(OwnLSTM):
        def forward(self, x, state):
            h, c = state
            i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * c
            return h, (h, c)

    return Cell(), (), {}


@sick("HS305")
def dropout_on_one_layer():
    import warnings

    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return M(dropout=0.3), (floats(),), {}


# Values


@sick("HS401")
def nan_in_the_data():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    x = floats()
    x[2, 4, 1] = float("nan")
    return M(), (x,), {}


@sick("HS401")
def log_of_zero():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(torch.log(x))[0])

    return M(), (floats().abs().round(),), {}


@sick("HS402")
def inputs_never_scaled():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            return self.fc(self.rnn(x)[0][:, -1])

    return M(), (floats() * 300 + 1000,), {}


@sick("HS402")
def unscaled_inputs_of_an_lstm():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (floats() * 500,), {}


@sick("HS403")
def weights_of_zero():
    class M(Model):
        def __init__(self):
            super().__init__()
            for p in self.lstm.parameters():
                nn.init.zeros_(p)

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    return M(), (floats(),), {}


@sick("HS403")
def relu_pushed_below_zero():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(F_IN, H, nonlinearity="relu", batch_first=True)
            nn.init.constant_(self.rnn.bias_ih_l0, -50.0)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    return M(), (floats(),), {}


@sick("HS404", "HS104")
def input_weights_of_zero():
    class M(Model):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.lstm.weight_ih_l0)

        def forward(self, x):
            return self.fc(torch.cat([self.lstm(x)[0]], 1)) + x.sum(-1, keepdim=True)

    return M(), (floats(),), {}


@sick("HS104", "HS103", "HS405")
def same_step_fed_again_and_again():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h0 = torch.zeros(x.size(0), H)
            outs = []
            for _ in range(x.size(1)):
                h = self.cell(x[:, 0], h0)
                outs.append(self.fc(h))
            return torch.stack(outs, 1)

    return M(), (floats(),), {}


# Gradients


@sick("HS501")
def weights_too_small_for_a_long_sequence():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(F_IN, H, batch_first=True)
            with torch.no_grad():
                self.rnn.weight_hh_l0.mul_(0.2)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            return self.fc(self.rnn(x)[0][:, -1])

    return M(), (floats(B, 40, F_IN),), {}


@sick("HS502")
def weights_too_large():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(F_IN, H, nonlinearity="relu", batch_first=True)
            with torch.no_grad():
                self.rnn.weight_hh_l0.copy_(1.6 * torch.eye(H))
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            return self.fc(self.rnn(x)[0][:, -1])

    return M(), (floats(B, 30, F_IN) * 0.1,), {}


@sick("HS503")
def layer_left_over():
    class M(Model):
        def __init__(self):
            super().__init__()
            self.fc2 = nn.Linear(H, 4)

        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (floats(),), {}


@sick("HS503", "HS105")
def encoder_detached():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(F_IN, H, batch_first=True)
            self.decoder = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, F_IN)

        def forward(self, x, y):
            with torch.no_grad():
                _, h = self.encoder(x)
            return self.fc(self.decoder(y, h)[0])

    return M(), (floats(), floats()), {}


@sick("HS504")
def optimizer_made_before_the_head():
    class M(Model):
        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    model = M()
    optimizer = torch.optim.Adam(model.parameters())
    model.fc = nn.Linear(H, 10)
    return model, (floats(),), {"optimizer": optimizer}


@sick("HS103", "HS405")
def cell_that_returns_the_state_it_was_given():
    class Cell(OwnCell):
        def forward(self, x, h):
            new = torch.tanh(self.i2h(x) + self.h2h(h))
            return new, h

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()
            self.h0 = nn.Parameter(torch.randn(1, H))
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = self.h0.expand(len(x), -1)
            outs = []
            for t in range(x.size(1)):
                out, h = self.cell(x[:, t], h)
                outs.append(self.fc(out))
            return torch.stack(outs, 1)

    return M(), (floats(),), {}


# Orders, modes, shared weights, precision


@sick("HS111")
def packed_as_if_rows_were_sorted():
    class M(Model):
        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            _, (h, _) = self.lstm(packed)
            return self.fc(h[-1])

    return M(), (floats(), torch.tensor([4, 9, 6, 2, 7])), {}


@sick("HS112")
def targets_fed_by_chance_in_any_mode():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.fc = nn.Embedding(V, H), nn.Linear(H, V)
            self.encoder, self.decoder = nn.GRU(H, H, batch_first=True), nn.GRU(H, H, batch_first=True)
            self.teacher_forcing_ratio = 0.5

        def forward(self, source, target):
            _, h = self.encoder(self.emb(source))
            token, outs = target[:, :1], []
            for t in range(1, target.size(1)):
                out, h = self.decoder(self.emb(token), h)
                outs.append(self.fc(out))
                forced = np.random.rand() < self.teacher_forcing_ratio
                token = target[:, t : t + 1] if forced else outs[-1].argmax(-1)
            return torch.cat(outs, 1)

    return M(), (tokens(), tokens(B, 8)), {}


@sick("HS209")
def trained_without_the_state_that_it_is_used_with():
    class M(Model):
        def forward(self, x, state):
            out, state = self.lstm(x) if self.training else self.lstm(x, state)
            return self.fc(out), state

    return M(), (floats(), (torch.zeros(1, B, H), torch.zeros(1, B, H))), {}


@sick("HS306")
def one_layer_three_times_in_a_list():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.GRU(H, H, batch_first=True)] * 3)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)[0]
            return self.fc(x)

    return M(), (floats(B, T, H),), {}


@sick("HS306")
def shallow_copies_of_a_cell():
    import copy

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            first = nn.GRUCell(H, H)
            self.cells, self.fc = nn.ModuleList([first, copy.copy(first)]), nn.Linear(H, 2)

        def forward(self, x):
            states = [x.new_zeros(len(x), H) for _ in self.cells]
            for y in x.unbind(1):
                for k, cell in enumerate(self.cells):
                    y = states[k] = cell(y, states[k])
            return self.fc(y)

    return M(), (floats(B, T, H),), {}


@sick("HS406")
def state_rounded_at_every_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.fc = nn.LSTMCell(F_IN, H), nn.Linear(H, 2)

        def forward(self, x):
            h = c = x.new_zeros(len(x), H)
            for x_t in x.unbind(1):
                h, c = self.cell(x_t, (h, c))
                h, c = h.half().float(), c.half().float()
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS402")
def loop_with_weights_too_large():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.u = nn.Parameter(5 * torch.randn(F_IN, 16)), nn.Parameter(5 * torch.randn(16, 16))
            self.fc = nn.Linear(16, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), 16)
            for x_t in x.unbind(1):
                h = torch.tanh(x_t @ self.w + h @ self.u)
            return self.fc(h)

    return M(), (floats(),), {}


@sick("HS303")
def layer_initialized_with_a_constant():
    model = nn.LSTM(F_IN, H, batch_first=True)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return model, (floats(),), {}


@sick("HS403")
def update_gate_that_lets_nothing_in():
    model = nn.GRU(F_IN, H, batch_first=True)
    with torch.no_grad():
        model.bias_ih_l0[H : 2 * H] = 60.0
    return model, (floats(),), {}


@sick("HS304")
def one_plus_the_gate():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size, self.z, self.n = H, nn.Linear(F_IN + H, H), nn.Linear(F_IN + H, H)

        def forward(self, x, h):
            xh = torch.cat([x, h], -1)
            z, n = torch.sigmoid(self.z(xh)), torch.tanh(self.n(xh))
            return (1 + z) * h + z * n

    return Cell(), (floats(B, F_IN), torch.zeros(B, H)), {}


@sick("HS404")
def positions_fed_in_place_of_the_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.gru = nn.Embedding(50, 6), nn.GRU(6, H, batch_first=True)
            self.fc = nn.Linear(H + F_IN, 2)

        def forward(self, x):
            out, _ = self.gru(self.emb(torch.arange(x.size(1)).expand(len(x), -1)))
            return self.fc(torch.cat([out, x], -1))

    return M(), (floats(),), {}
