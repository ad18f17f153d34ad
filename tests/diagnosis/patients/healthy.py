"""Healthy models, as people write them, among them many that look suspicious.

`HEALTHY` maps a name to a function that returns what `hs.diagnose` is called with: `(model, inputs, options)`.
"""

# People leave names unused; that is part of many a mistake.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
HEALTHY: dict[str, Callable[[], Case]] = {}

B, T, F_IN, H, V = 5, 9, 3, 8, 20


def healthy(fn: Callable[[], Case]) -> Callable[[], Case]:
    HEALTHY[fn.__name__.replace("_", " ")] = fn
    return fn


def floats(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, T, F_IN)))


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, V, shape or (B, T))


class Classifier(nn.Module):
    """LSTM, last hidden state, linear head."""

    def __init__(self, layers: int = 1, bidirectional: bool = False, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(F_IN, H, num_layers=layers, batch_first=True, bidirectional=bidirectional)  # type: ignore[call-arg]
        self.fc = nn.Linear(H * (2 if bidirectional else 1), 4)

    def forward(self, x):
        _, h = self.rnn(x)
        h = h[0] if isinstance(h, tuple) else h
        last = torch.cat([h[-2], h[-1]], dim=1) if self.rnn.bidirectional else h[-1]
        return self.fc(last)


@healthy
def lstm_classifier():
    return Classifier(), (floats(),), {}


@healthy
def two_layer_gru_classifier():
    return Classifier(2, kind=nn.GRU), (floats(),), {}


@healthy
def bidirectional_classifier():
    return Classifier(2, bidirectional=True), (floats(),), {}


@healthy
def bidirectional_by_hand():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fwd = nn.GRU(F_IN, H, batch_first=True)
            self.bwd = nn.GRU(F_IN, H, batch_first=True)
            self.tag = nn.Linear(2 * H, 3)

        def forward(self, x):
            a, _ = self.fwd(x)
            b, _ = self.bwd(torch.flip(x, [1]))
            return self.tag(torch.cat([a, torch.flip(b, [1])], -1))

    return M(), (floats(),), {}


def turned(x: Tensor, lengths: Tensor) -> Tensor:
    """The real steps of each row from last to first, the padding where it was."""
    step, end = torch.arange(x.shape[1]), lengths.unsqueeze(1)
    order = torch.where(step < end, end - 1 - step, step)
    return x.gather(1, order.unsqueeze(2).expand_as(x))


class TurnedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.fwd = nn.GRU(F_IN, H, batch_first=True)
        self.bwd = nn.GRU(F_IN, H, batch_first=True)
        self.tag = nn.Linear(2 * H, 3)

    def forward(self, x, lengths):
        b, _ = self.bwd(turned(x, lengths))
        return self.tag(torch.cat([self.fwd(x)[0], turned(b, lengths)], -1))


@healthy
def bidirectional_by_hand_within_lengths():
    lengths = torch.tensor([4, T, 2, 7, 5])
    return TurnedByHand(), (floats(), lengths), {"lengths": lengths}


@healthy
def bidirectional_by_hand_within_lengths_that_only_the_model_is_told():
    return TurnedByHand(), (floats(), torch.tensor([4, T, 2, 7, 5])), {}


@healthy
def bidirectional_cells():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fwd, self.bwd = nn.GRUCell(F_IN, H), nn.GRUCell(F_IN, H)
            self.tag = nn.Linear(2 * H, 3)

        def forward(self, x):
            a = b = x.new_zeros(len(x), H)
            ahead, back = [], []
            for t in range(x.shape[1]):
                a, b = self.fwd(x[:, t], a), self.bwd(x[:, -1 - t], b)
                ahead.append(a)
                back.insert(0, b)
            return self.tag(torch.cat([torch.stack(ahead, 1), torch.stack(back, 1)], -1))

    return M(), (floats(),), {}


@healthy
def bidirectional_tagger():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, H, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * H, 4)

        def forward(self, x):
            return self.fc(self.lstm(self.emb(x))[0])

    return M(), (tokens(),), {}


@healthy
def bidirectional_first_and_last():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * H, 2)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(torch.cat([out[:, -1, :H], out[:, 0, H:]], dim=1))

    return M(), (floats(),), {}


@healthy
def attention_over_time():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True, bidirectional=True)
            self.attn = nn.Linear(2 * H, 1)
            self.fc = nn.Linear(2 * H, 3)

        def forward(self, x):
            out, _ = self.lstm(x)
            w = torch.softmax(self.attn(torch.tanh(out)), dim=1)
            return self.fc((w * out).sum(dim=1)), w.squeeze(-1)

    return M(), (floats(),), {}


@healthy
def self_attention_tagger():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.attn = nn.MultiheadAttention(H, 2, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x):
            out, _ = self.lstm(x)
            ctx, _ = self.attn(out, out, out)
            return self.fc(out + ctx)

    return M(), (floats(),), {}


@healthy
def dot_attention_tagger_by_hand():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(2 * H, 3)

        def forward(self, x):
            out, _ = self.gru(x)
            w = torch.softmax(torch.bmm(out, out.transpose(1, 2)) / H**0.5, dim=-1)
            return self.fc(torch.cat([out, torch.bmm(w, out)], -1))

    return M(), (floats(),), {}


@healthy
def batch_norm_in_training_mode():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(F_IN)
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.bn2 = nn.BatchNorm1d(H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            x = self.bn(x.transpose(1, 2)).transpose(1, 2)
            _, (h, _) = self.lstm(x)
            return self.fc(self.bn2(h[-1]))

    return M().train(), (floats(),), {}


@healthy
def heavy_dropout():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, num_layers=2, dropout=0.5, batch_first=True)
            self.drop = nn.Dropout(0.5)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            out, _ = self.lstm(self.drop(x))
            return self.fc(self.drop(out[:, -1]))

    return M().train(), (floats(),), {}


@healthy
def relu_rnn():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(F_IN, 16, nonlinearity="relu", batch_first=True)
            self.fc = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    return M(), (floats(),), {}


@healthy
def siamese_towers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.LSTM(F_IN, H, batch_first=True)

        def embed(self, x):
            return self.tower(x)[1][0][-1]

        def forward(self, a, b):
            return torch.exp(-(self.embed(a) - self.embed(b)).abs().sum(1))

    return M(), (floats(), floats(B, T + 2, F_IN)), {}


@healthy
def contrastive_similarity_matrix():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRU(F_IN, H, batch_first=True)
            self.b = nn.GRU(F_IN, H, batch_first=True)

        def forward(self, x, y):
            a = F.normalize(self.a(x)[1][-1], dim=-1)
            b = F.normalize(self.b(y)[1][-1], dim=-1)
            return a @ b.t()

    return M(), (floats(), floats()), {}


@healthy
def language_model_with_tied_weights():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, H)
            self.lstm = nn.LSTM(H, H, 2, batch_first=True, dropout=0.2)
            self.out = nn.Linear(H, V)
            self.out.weight = self.emb.weight

        def forward(self, x, hidden=None):
            out, hidden = self.lstm(self.emb(x), hidden)
            return self.out(out), hidden

    return M(), (tokens(),), {}


@healthy
def flattened_language_model_with_targets():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, H)
            self.rnn = nn.GRU(H, H)
            self.out = nn.Linear(H, V)

        def forward(self, x):  # (time, batch)
            out, _ = self.rnn(self.emb(x))
            return self.out(out.view(-1, H))

    y = torch.randint(V, (T, B))
    return M(), (tokens(T, B),), {"batch_axis": 1, "targets": y, "loss": lambda o, t: F.cross_entropy(o, t.view(-1))}


@healthy
def tiny_fresh_net():
    return Classifier(kind=nn.RNN), (torch.randn(2, 4, F_IN) * 0.01,), {}


@healthy
def one_unit_lstm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, 1, batch_first=True)
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (torch.randn(4, 6, 1),), {}


class Seq2Seq(nn.Module):
    """Teacher forcing: the decoder starts from the encoder's state and reads the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.src = nn.Embedding(V, 6)
        self.tgt = nn.Embedding(V, 6)
        self.encoder = nn.LSTM(6, H, batch_first=True)
        self.decoder = nn.LSTM(6, H, batch_first=True)
        self.out = nn.Linear(H, V)

    def forward(self, src, tgt):
        _, state = self.encoder(self.src(src))
        out, _ = self.decoder(self.tgt(tgt), state)
        return self.out(out)


@healthy
def teacher_forcing_of_equal_lengths():
    return Seq2Seq(), (tokens(), tokens()), {}


@healthy
def teacher_forcing_of_other_lengths():
    return Seq2Seq(), (tokens(), tokens(B, 6)), {}


@healthy
def teacher_forcing_in_training_only():
    class M(Seq2Seq):
        def forward(self, src, tgt):
            _, (h, c) = self.encoder(self.src(src))
            token = torch.zeros(len(src), 1, dtype=torch.long)
            outs = []
            state = (h, c)
            for t in range(tgt.size(1)):
                out, state = self.decoder(self.tgt(token), state)
                logits = self.out(out)
                outs.append(logits)
                token = tgt[:, t : t + 1] if self.training else logits.argmax(-1)
            return torch.cat(outs, 1)

    return M(), (tokens(), tokens()), {}


@healthy
def decoder_with_attention():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.encoder = nn.GRU(6, H, batch_first=True)
            self.cell = nn.GRUCell(6 + H, H)
            self.score = nn.Linear(2 * H, 1)
            self.out = nn.Linear(2 * H, V)

        def forward(self, src, tgt):
            memory, h = self.encoder(self.emb(src))
            h = h[-1]
            outs = []
            for t in range(tgt.size(1)):
                q = h.unsqueeze(1).expand(-1, memory.size(1), -1)
                w = torch.softmax(self.score(torch.cat([q, memory], -1)), dim=1)
                ctx = (w * memory).sum(1)
                h = self.cell(torch.cat([self.emb(tgt[:, t]), ctx], -1), h)
                outs.append(self.out(torch.cat([h, ctx], -1)))
            return torch.stack(outs, 1)

    return M(), (tokens(), tokens(B, 5)), {}


@healthy
def learned_initial_state_that_is_trained():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.h0 = nn.Parameter(torch.zeros(1, 1, H))
            self.c0 = nn.Parameter(torch.zeros(1, 1, H))
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            n = x.size(0)
            state = (self.h0.expand(-1, n, -1).contiguous(), self.c0.expand(-1, n, -1).contiguous())
            return self.fc(self.lstm(x, state)[0][:, -1])

    model = M()
    return model, (floats(),), {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@healthy
def zeros_made_from_the_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, 2, batch_first=True)
            self.fc = nn.Linear(H, 1)

        def forward(self, x):
            h0 = torch.zeros(2, x.size(0), H, device=x.device)
            c0 = torch.zeros(2, x.size(0), H, device=x.device)
            out, _ = self.lstm(x, (h0, c0))
            return self.fc(out[:, -1, :])

    return M(), (floats(),), {}


@healthy
def layer_norm_cell_in_a_loop():
    from tests.support.cells import LayerNormLSTMCell

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = LayerNormLSTMCell(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            h = x.new_zeros(x.size(0), H)
            c = x.new_zeros(x.size(0), H)
            for t in range(x.size(1)):
                out, (h, c) = self.cell(x[:, t], (h, c))
            return self.fc(out)

    return M(), (floats(),), {}


@healthy
def packed_inside_with_lengths():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, H, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * H, 3)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
            _, (h, _) = self.lstm(packed)
            return self.fc(torch.cat([h[-2], h[-1]], 1))

    x, lengths = tokens(), torch.tensor([4, 9, 2, 7, 5])
    x[torch.arange(T) >= lengths.unsqueeze(1)] = 0
    return M(), (x, lengths), {"lengths": lengths}


@healthy
def packed_tagger_with_sorted_lengths_only():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
            return self.fc(out)

    lengths = torch.tensor([9, 7, 5, 4, 2])
    x = floats() * (torch.arange(T) < lengths.unsqueeze(1)).unsqueeze(-1)
    return M(), (x, lengths), {"lengths": lengths}


@healthy
def sorted_and_put_back():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order], lengths.cpu(), batch_first=True)
            _, h = self.gru(packed)
            return self.fc(h[-1][order.argsort()])

    lengths = torch.tensor([4, 9, 2, 7, 5])
    return M(), (floats(), lengths), {"lengths": lengths}


@healthy
def masked_mean_pooling():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, mask):
            out, _ = self.gru(x)
            m = mask.unsqueeze(-1).float()
            return self.fc((out * m).sum(1) / m.sum(1))

    lengths = torch.tensor([4, 9, 2, 7, 5])
    mask = torch.arange(T) < lengths.unsqueeze(1)
    return M(), (floats(), mask), {}


@healthy
def gathered_last_valid_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x, lengths):
            out, _ = self.lstm(x)
            return self.fc(out[torch.arange(len(x)), lengths - 1])

    lengths = torch.tensor([4, 9, 2, 7, 5])
    return M(), (floats(), lengths), {"lengths": lengths}


@healthy
def packed_sequence_as_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H)
            self.fc = nn.Linear(H, 3)

        def forward(self, packed):
            _, (h, _) = self.lstm(packed)
            return self.fc(h[-1])

    lengths = torch.tensor([4, 9, 2, 7, 5])
    packed = pack_padded_sequence(floats(), lengths, batch_first=True, enforce_sorted=False)
    return M(), (packed,), {}


@healthy
def hierarchical_model():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.words = nn.GRU(6, H, batch_first=True)
            self.sentences = nn.GRU(H, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):  # (batch, sentences, words)
            vectors = [self.words(self.emb(x[:, s]))[1][-1] for s in range(x.size(1))]
            _, h = self.sentences(torch.stack(vectors, 1))
            return self.fc(h[-1])

    return M(), (tokens(B, 4, 6),), {}


@healthy
def hierarchical_model_with_folded_rows():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.words = nn.GRU(6, H, batch_first=True)
            self.sentences = nn.GRU(H, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            b, s, w = x.shape
            _, h = self.words(self.emb(x.view(b * s, w)))
            _, h = self.sentences(h[-1].view(b, s, -1))
            return self.fc(h[-1])

    return M(), (tokens(B, 4, 6),), {}


@healthy
def dict_of_outputs_and_states():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, 2, batch_first=True)
            self.tag, self.cls = nn.Linear(H, 3), nn.Linear(H, 2)

        def forward(self, x):
            out, (h, c) = self.lstm(x)
            return {"tags": self.tag(out), "label": self.cls(h[-1]), "state": (h, c)}

    return M(), (floats(),), {}


@healthy
def stateful_with_reset():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H, 2)
            self.hidden = None

        def reset_hidden(self):
            self.hidden = None

        def forward(self, x):
            out, (h, c) = self.lstm(x, self.hidden)
            self.hidden = (h.detach(), c.detach())
            return self.fc(out)

    return M(), (floats(),), {}


@healthy
def convolutional_front_end():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(F_IN, 6, 3, padding=1)
            self.lstm = nn.LSTM(6, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x):
            x = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.fc(self.lstm(x)[0])

    return M(), (floats(),), {}


@healthy
def crnn_for_images():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.rnn = nn.LSTM(4 * 4, H, bidirectional=True)
            self.fc = nn.Linear(2 * H, 10)

        def forward(self, x):  # (batch, 1, 8, width)
            f = self.cnn(x)
            f = f.permute(3, 0, 1, 2).flatten(2)
            return self.fc(self.rnn(f)[0]).log_softmax(-1)  # (time, batch, class), as CTC wants it

    return M(), (torch.rand(4, 1, 8, 24),), {}


@healthy
def gru_with_decay_for_missing_values():
    class DecayCell(nn.Module):
        def __init__(self, input_size, hidden_size):
            super().__init__()
            self.input_size, self.hidden_size = input_size, hidden_size
            self.decay = nn.Linear(input_size, hidden_size)
            self.gru = nn.GRUCell(2 * input_size, hidden_size)

        def forward(self, x, mask, delta, h):
            gamma = torch.exp(-torch.relu(self.decay(delta)))
            return self.gru(torch.cat([x * mask, mask], -1), gamma * h)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = DecayCell(F_IN, H)
            self.fc = nn.Linear(H, 1)

        def forward(self, x, mask, delta):
            h = x.new_zeros(len(x), H)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], mask[:, t], delta[:, t], h)
            return torch.sigmoid(self.fc(h)).squeeze(-1)

    return M(), (floats(), (torch.rand(B, T, F_IN) > 0.3).float(), torch.rand(B, T, F_IN) * 3), {}


@healthy
def residual_stack():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(F_IN, H)
            self.layers = nn.ModuleList(nn.LSTM(H, H, batch_first=True) for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(3))
            self.out = nn.Linear(H, 2)

        def forward(self, x):
            x = self.inp(x)
            for lstm, norm in zip(self.layers, self.norms, strict=True):
                x = x + lstm(norm(x))[0]
            return self.out(x)

    return M(), (floats(),), {}


@healthy
def double_precision():
    return Classifier().double(), (floats().double(),), {}


@healthy
def time_first_model():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[-1])

    return M(), (floats(T, B, F_IN),), {"batch_axis": 1}


@healthy
def time_first_inside():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F_IN, H)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            out, _ = self.lstm(x.permute(1, 0, 2))
            return self.fc(out.permute(1, 0, 2))

    return M(), (floats(),), {}


@healthy
def extra_inputs_that_are_no_sequence():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Embedding(10, 4)
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.fc = nn.Linear(H + 4 + 2, 1)

        def forward(self, x, static, user):
            _, h = self.gru(x)
            return self.fc(torch.cat([h[-1], static, self.user(user)], 1))

    return M(), (floats(), floats(B, 2), torch.randint(10, (B,))), {}


@healthy
def forecaster_of_several_steps():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, H, batch_first=True)
            self.fc = nn.Linear(H, 3)

        def forward(self, x):  # (batch, time)
            out, _ = self.lstm(x.unsqueeze(-1))
            return self.fc(out[:, -1])

    return M(), (floats(B, T),), {}


@healthy
def forecaster_that_feeds_itself():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(1, H)
            self.fc = nn.Linear(H, 1)

        def forward(self, x):
            h = c = x.new_zeros(x.size(0), H)
            outs = []
            for t in range(x.size(1)):
                h, c = self.cell(x[:, t], (h, c))
                y = self.fc(h)
                outs.append(y)
            for _ in range(4):
                h, c = self.cell(y, (h, c))
                y = self.fc(h)
                outs.append(y)
            return torch.stack(outs, 1).squeeze(-1)

    return M(), (floats(B, T, 1),), {}


@healthy
def sequence_autoencoder():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.LSTM(F_IN, H, batch_first=True)
            self.decoder = nn.LSTM(H, H, batch_first=True)
            self.out = nn.Linear(H, F_IN)

        def forward(self, x):
            _, (h, _) = self.encoder(x)
            z = h[-1].unsqueeze(1).repeat(1, x.size(1), 1)
            return self.out(self.decoder(z)[0])

    return M(), (floats(),), {}


@healthy
def variational_autoencoder_that_samples_in_training():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(F_IN, H, batch_first=True)
            self.mu, self.logvar = nn.Linear(H, 4), nn.Linear(H, 4)
            self.init = nn.Linear(4, H)
            self.decoder = nn.GRU(F_IN, H, batch_first=True)
            self.out = nn.Linear(H, F_IN)

        def forward(self, x):
            _, h = self.encoder(x)
            mu, logvar = self.mu(h[-1]), self.logvar(h[-1])
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
            shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
            out, _ = self.decoder(shifted, self.init(z).unsqueeze(0))
            return self.out(out), mu, logvar

    return M(), (floats(),), {}


@healthy
def stack_of_cells_in_a_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(F_IN, H), nn.LSTMCell(H, H)])
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            states = [(x.new_zeros(len(x), H), x.new_zeros(len(x), H)) for _ in self.cells]
            outs = []
            for t in range(x.size(1)):
                inp = x[:, t]
                for i, cell in enumerate(self.cells):
                    states[i] = cell(inp, states[i])
                    inp = states[i][0]
                outs.append(self.fc(inp))
            return torch.stack(outs, dim=1)

    return M(), (floats(),), {}


@healthy
def quantile_heads():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(F_IN, H, batch_first=True)
            self.heads = nn.ModuleList(nn.Linear(H, 1) for _ in range(3))

        def forward(self, x):
            out, _ = self.gru(x)
            return [head(out[:, -1]).squeeze(-1) for head in self.heads]

    return M(), (floats(),), {}


@healthy
def bare_layers():
    return nn.GRU(F_IN, H, 2, batch_first=True), (floats(),), {}


@healthy
def bare_bidirectional_layer_time_first():
    return nn.LSTM(F_IN, H, bidirectional=True), (floats(T, B, F_IN),), {"batch_axis": 1}


@healthy
def single_row():
    return Classifier(), (floats(1, T, F_IN),), {}


@healthy
def unbatched_tagger_of_the_tutorials():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.lstm = nn.LSTM(6, H)
            self.tag = nn.Linear(H, 3)

        def forward(self, sentence):
            e = self.emb(sentence)
            out, _ = self.lstm(e.view(len(sentence), 1, -1))
            return F.log_softmax(self.tag(out.view(len(sentence), -1)), dim=1)

    return M(), (tokens(T),), {}


@healthy
def character_model_with_state_in_and_out():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6)
            self.lstm = nn.LSTM(6, H, 2, batch_first=True)
            self.fc = nn.Linear(H, V)

        def init_hidden(self, n):
            return torch.zeros(2, n, H), torch.zeros(2, n, H)

        def forward(self, x, hidden):
            out, hidden = self.lstm(self.emb(x), hidden)
            return self.fc(out), hidden

    model = M()
    return model, (tokens(), model.init_hidden(B)), {}


@healthy
def frozen_feature_extractor():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Linear(F_IN, 6).requires_grad_(False)
            self.lstm = nn.LSTM(6, H, batch_first=True)
            self.fc = nn.Linear(H, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.features(x)
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (floats(),), {}


@healthy
def ragged_loss_that_ignores_padding():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(V, 6, padding_idx=0)
            self.gru = nn.GRU(6, H, batch_first=True)
            self.fc = nn.Linear(H, 4)

        def forward(self, x):
            return self.fc(self.gru(self.emb(x))[0])

    lengths = torch.tensor([9, 7, 5, 4, 2])
    pad = torch.arange(T) >= lengths.unsqueeze(1)
    x = tokens().masked_fill(pad, 0)
    y = torch.randint(4, (B, T)).masked_fill(pad, -100)
    loss = lambda o, t: F.cross_entropy(o.transpose(1, 2), t)  # noqa: E731
    return M(), (x,), {"lengths": lengths, "targets": y, "loss": loss}


@healthy
def weights_normed_and_biases_of_zero() -> Case:
    model = Classifier()
    for layer in model.modules():
        if isinstance(layer, nn.LSTM):
            for name in ("weight_ih_l0", "weight_hh_l0"):
                nn.utils.parametrizations.weight_norm(layer, name)
            for name in ("bias_ih_l0", "bias_hh_l0"):
                nn.init.zeros_(getattr(layer, name))
    return model, (floats(),), {}


# What the rules about masks, modes, shared weights and precision must leave alone


@healthy
def language_model_that_needs_no_mask():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.head = nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, V)

        def forward(self, input_ids, attention_mask=None):
            return self.head(self.gru(self.embed(input_ids))[0])  # what lies behind a step does not reach it

    mask = (torch.arange(T) < torch.tensor([[T], [5], [3], [7], [6]])).long()
    return M(), (), {"input_ids": tokens() * mask, "attention_mask": mask}


@healthy
def mask_with_padding_on_the_left():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.head = nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, 3)

        def forward(self, input_ids, attention_mask):
            out, _ = self.gru(self.embed(input_ids) * attention_mask.unsqueeze(-1))
            return self.head(out[:, -1])

    mask = (torch.arange(T).flip(0) < torch.tensor([[T], [5], [3], [7], [6]])).long()
    return M(), (tokens() * mask, mask), {}


@healthy
def agent_whose_masks_keep_its_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.pi = nn.GRUCell(F_IN, H), nn.Linear(H, 2)

        def forward(self, obs, rnn_hxs, masks):
            outs = []
            for t in range(obs.size(1)):
                rnn_hxs = self.gru(obs[:, t], rnn_hxs * masks[:, t : t + 1])
                outs.append(self.pi(rnn_hxs))
            return torch.stack(outs, 1), rnn_hxs

    masks = torch.ones(B, T)
    masks[1, 6:] = masks[3, -1] = 0  # looks like padding
    return M(), (floats(), torch.zeros(B, H), masks), {}


@healthy
def values_that_were_not_observed():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(F_IN + 1, H), nn.Linear(H, 2)

        def forward(self, x, mask):
            h, last = x.new_zeros(len(x), H), torch.zeros_like(x[:, 0])
            for t in range(x.size(1)):
                last = torch.where(mask[:, t : t + 1] > 0, x[:, t], last)
                h = self.cell(torch.cat([last, mask[:, t : t + 1]], 1), h)
            return self.head(h)

    return M(), (floats(), (torch.rand(B, T) < 0.6).float()), {}


@healthy
def noise_on_the_first_state_in_training():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(F_IN, H, batch_first=True), nn.Linear(H, 2)

        def forward(self, x):
            h = x.new_zeros(1, len(x), H)
            h = h + 0.1 * torch.randn_like(h) if self.training else h
            return self.head(self.gru(x, h)[0])

    return M(), (floats(),), {}


@healthy
def state_that_is_dropped_now_and_then_in_training():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(F_IN, H, batch_first=True), nn.Linear(H, 2)

        def forward(self, x, h):
            keep = (torch.rand(1, len(x), 1) > 0.5).float() if self.training else 1.0
            out, h = self.gru(x, h * keep)
            return self.head(out), h

    return M(), (floats(), torch.randn(1, B, H)), {}


@healthy
def beginning_given_and_the_rest_made():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(V, H), nn.GRUCell(H, H), nn.Linear(H, V)

        def forward(self, prompt):
            h, outs = torch.zeros(len(prompt), H), []
            for t in range(2 * prompt.size(1)):
                token = prompt[:, t] if t < prompt.size(1) else outs[-1].argmax(1)
                h = self.cell(self.embed(token), h)
                outs.append(self.head(h))
            return torch.stack(outs, 1)

    return M(), (tokens(),), {}


@healthy
def one_layer_called_three_times_and_by_two_names():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(H, H, batch_first=True), nn.Linear(2 * H, 2)
            self.left = self.right = self.gru

        def forward(self, a, b):
            for _ in range(3):
                a, b = a + self.left(a)[0], b + self.right(b)[0]
            return self.head(torch.cat([a, b], -1))

    return M(), (floats(B, T, H), floats(B, T, H)), {}


@healthy
def activation_that_stands_in_a_list_several_times():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            act = nn.Tanh()
            self.gru, self.head = (
                nn.GRU(F_IN, H, batch_first=True),
                nn.Sequential(nn.Linear(H, H), act, nn.Linear(H, H), act, nn.Linear(H, 2)),
            )

        def forward(self, x):
            return self.head(self.gru(x)[0])

    return M(), (floats(),), {}


@healthy
def all_of_it_in_bfloat16():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(F_IN, H), nn.Linear(H, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), H)
            for x_t in x.unbind(1):
                h = self.cell(x_t, h)
            return self.head(h)

    return M().bfloat16(), (floats().bfloat16(),), {}


@healthy
def outputs_stored_in_half():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(F_IN, H), nn.Linear(H, 2)

        def forward(self, x):
            h, outs = x.new_zeros(len(x), H), []
            for x_t in x.unbind(1):
                h = self.cell(x_t, h)
                outs.append(h.half())
            return self.head(torch.stack(outs, 1).float())

    return M(), (floats(),), {}


@healthy
def computed_under_autocast():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rec, self.head = nn.Linear(F_IN, H), nn.Linear(H, H), nn.Linear(H, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), H)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for x_t in x.unbind(1):
                    h = torch.tanh(self.inp(x_t) + self.rec(h))
            return self.head(h.float())

    return M(), (floats(),), {}
