"""What was misjudged once: healthy models that raised an alarm, each beside a sick one of the same kind.

`PAIRS` maps a name to `(code, sick, healthy)`: functions that return what `hs.diagnose` is called with. The code has to
be found in the one, and nothing in the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.diagnosis.patients.healthy import Case

Pair = tuple[str, Callable[[], Case], Callable[[], Case]]
PAIRS: dict[str, Pair] = {}


def pair(code: str) -> Callable[[Callable[[bool], Case]], Callable[[bool], Case]]:
    """Note a function that makes the sick model where it is told so, else the healthy one."""

    def note(make: Callable[[bool], Case]) -> Callable[[bool], Case]:
        PAIRS[make.__name__.replace("_", " ")] = (code, lambda: make(True), lambda: make(False))
        return make

    return note


# Stepped fused layers


class TutorialDecoder(nn.Module):
    """One token in, one distribution out, as the translation tutorial has it."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)
        self.sick = sick

    def forward(self, encoder_outputs: Tensor, encoder_hidden: Tensor, target_tensor: Tensor | None = None) -> Any:
        token = torch.zeros(encoder_outputs.size(0), 1, dtype=torch.long)
        hidden, outputs = encoder_hidden, []
        for i in range(6):
            output, hidden = self.forward_step(token, hidden)
            outputs.append(output)
            if target_tensor is not None:
                token = target_tensor[:, i].unsqueeze(1)
            else:
                token = output.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1), hidden, None

    def forward_step(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.gru(F.relu(self.embedding(token)), hidden)
        return self.out(output), hidden.detach() if self.sick else hidden


@pair("HS105")
def decoder_of_the_translation_tutorial(sick):
    return TutorialDecoder(sick), (torch.randn(4, 7, 8), torch.randn(1, 4, 8), torch.randint(12, (4, 6))), {}


@pair("HS105")
def decoder_without_targets(sick):
    return TutorialDecoder(sick), (torch.randn(4, 7, 8), torch.randn(1, 4, 8)), {}


@pair("HS105")
def tokens_stepped_through_a_fused_layer(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 12)

        def forward(self, x):
            state, outs = None, []
            for t in range(x.shape[1]):
                out, state = self.lstm(self.embed(x[:, t : t + 1]), state)
                if sick:
                    state = tuple(s.detach() for s in state)
                outs.append(out)
            return self.head(torch.cat(outs, 1))

    return M(), (torch.randint(12, (4, 9)),), {}


@pair("HS105")
def one_hot_stepped_through_a_fused_layer(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(12, 8), nn.Linear(8, 12)

        def forward(self, x):
            hidden, outs = None, []
            for step in F.one_hot(x, 12).float().unbind(1):
                out, hidden = self.rnn(step.unsqueeze(0), hidden)
                hidden = hidden.data if sick else hidden
                outs.append(self.head(out[0]))
            return torch.stack(outs, 1)

    return M(), (torch.randint(12, (4, 9)),), {}


# What is a state


@pair("HS103")
def previous_tokens_are_no_state(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.source = nn.Embedding(12, 6), nn.Embedding(12, 6)
            self.encoder, self.decoder = nn.GRU(6, 8, batch_first=True), nn.GRU(6, 8, batch_first=True)
            self.head = nn.Linear(8, 12)

        def forward(self, src_tokens, prev_output_tokens, prev_state=None):
            _, h = self.encoder(self.source(src_tokens))
            out, _ = self.decoder(self.embed(prev_output_tokens), h if prev_state is None or sick else prev_state)
            return self.head(out)

    given = (torch.randint(12, (4, 7)), torch.randint(12, (4, 5)))
    return M(), (*given, torch.randn(1, 4, 8)) if sick else given, {}


@pair("HS103")
def previous_action_beside_the_state(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.action, self.lstm, self.head = nn.Embedding(5, 4), nn.LSTMCell(7, 8), nn.Linear(8, 5)

        def forward(self, obs, prev_action, prev_reward, hx, cx):
            x = torch.cat([obs, self.action(prev_action)], 1)
            hx, cx = self.lstm(x, None if sick else (hx, cx))
            return self.head(hx) + prev_reward.unsqueeze(1), hx, cx

    return (
        M(),
        (torch.randn(4, 3), torch.randint(5, (4,)), torch.randn(4), torch.randn(4, 8), torch.randn(4, 8)),
        {},
    )


# Padding


class MaskedByToken(nn.Module):
    """Packed by length, and masked by `src.eq(pad)`, as attention in many translators."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(12, 6, padding_idx=0), nn.GRU(6, 8, batch_first=True)
        self.score, self.head, self.sick = nn.Linear(8, 1), nn.Linear(8, 3), sick

    def forward(self, src: Tensor, src_len: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(src), src_len.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=src.shape[1])
        scores = self.score(out).squeeze(-1)
        if not self.sick:
            scores = scores.masked_fill(src.eq(0), -1e9)
        return self.head((scores.softmax(1).unsqueeze(-1) * out).sum(1))


def padded_tokens(lengths: Tensor) -> Tensor:
    x = torch.randint(1, 12, (len(lengths), int(lengths.max())))
    return x * (torch.arange(x.shape[1]) < lengths.unsqueeze(1))


@pair("HS106")
def packed_and_masked_by_the_padding_token(sick):
    lengths = torch.tensor([9, 7, 4, 3])
    return MaskedByToken(sick), (padded_tokens(lengths), lengths), {"lengths": lengths}


# Random in eval


@pair("HS110")
def dropout_that_stays_on_in_eval(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(x[order], lengths, batch_first=True)
            h = self.gru(packed)[1][-1]
            return self.head(h if sick else F.dropout(h[order.argsort()], 0.2, training=True))

    lengths = torch.tensor([5, 9, 3, 7])
    return M(), (torch.randn(4, 9, 3), lengths), {"lengths": lengths, **({} if sick else {"ignore": ["HS202"]})}


# Rows of time times batch


class Agent(nn.Module):
    """Rows are steps times environments, the state has one for each environment."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.network, self.lstm = nn.Linear(3, 6), nn.LSTM(6, 8)
        self.actor, self.critic, self.sick = nn.Linear(8, 4), nn.Linear(8, 1), sick

    def forward(self, x: Tensor, lstm_state: tuple[Tensor, Tensor], done: Tensor) -> Any:
        hidden = torch.tanh(self.network(x))
        rows = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, rows, 6))
        if self.sick:
            hidden = hidden - hidden.mean(1, keepdim=True)
        done, outs = done.reshape((-1, rows)), []
        for h, d in zip(hidden, done, strict=True):
            keep = (1.0 - d).view(1, -1, 1)
            out, lstm_state = self.lstm(h.unsqueeze(0), tuple(keep * part for part in lstm_state))
            outs.append(out)
        flat = torch.flatten(torch.cat(outs), 0, 1)
        return self.actor(flat), self.critic(flat), lstm_state


@pair("HS101")
def rows_are_steps_times_environments(sick):
    state = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    done = torch.zeros(24)
    done[[5, 14]] = 1.0
    return Agent(sick), (torch.randn(24, 3), state, done), {}


@pair("HS101")
def rows_are_steps_times_environments_of_images(sick):
    class M(Agent):
        def forward(self, x, lstm_state, done):
            return super().forward(x.flatten(1)[:, :3], lstm_state, done)

    state = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    return M(sick), (torch.randn(12, 1, 4, 4), state, torch.zeros(12)), {}


# Sparse wirings


@pair("HS302")
def sparse_wiring(sick):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.w, self.v = nn.Parameter(0.3 * torch.randn(8, 8)), nn.Parameter(torch.randn(3, 8))
            self.gate = nn.Linear(3, 8)
            mask = (torch.arange(8).unsqueeze(0) // 4 >= torch.arange(8).unsqueeze(1) // 4).float()
            mask[:, 4:] = mask[:, 4:] * (torch.rand(8, 4) > 0.3)
            self.register_buffer("sparsity_mask", mask)
            self.register_buffer("input_mask", torch.cat([torch.ones(3, 4), torch.zeros(3, 4)], 1))

        def forward(self, x, h):
            new = torch.tanh(x @ (self.v * self.input_mask) + h @ (self.w * self.sparsity_mask))
            gate = torch.sigmoid(self.gate(x))
            return new if sick else gate * new + (1 - gate) * h

    return Cell(), (), {}


# Registered or not


@pair("HS205")
def traced_module(sick):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.inner = torch.jit.trace(Inner(), torch.randn(4, 9, 3), check_trace=False)
            self.heads = [nn.Linear(8, 2)] if sick else nn.ModuleList([nn.Linear(8, 2)])

        def forward(self, x):
            return self.heads[0](self.inner(x))

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS205")
def constant_in_a_plain_attribute(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.tensor([0.5, 1.0, 2.0])
            self.h0 = torch.randn(1, 1, 8)
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            if sick:
                return self.head(self.gru(x * self.scale, self.h0.expand(1, len(x), 8).contiguous())[0])
            return self.head(self.gru(x * self.scale.to(x.device))[0])

    return M(), (torch.randn(4, 9, 3),), {}


# Several outputs


class Spiking(nn.Module):
    """Leaky integrate and fire by hand; spikes and membrane come out."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.fc, self.sick = nn.Linear(3, 8), sick

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, spikes, membranes = x.new_zeros(len(x), 8), [], []
        for step in x.unbind(1):
            state = self.fc(step) if self.sick else 0.9 * state + 0.1 * self.fc(step)
            spike = (state > 2.0).float()
            state = state - spike * 2.0
            spikes.append(spike)
            membranes.append(state)
        return torch.stack(spikes, 1), torch.stack(membranes, 1)


@pair("HS103")
def spikes_beside_the_membrane(sick):
    return Spiking(sick), (torch.randn(4, 9, 3),), {}


@pair("HS104")
def samples_beside_the_logits(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, x):
            logits = self.head(self.gru(torch.zeros_like(x) if sick else x)[0])
            return F.one_hot((logits * 1e-3).round().long()[..., 0].clamp(0, 4), 5).float(), logits

    return M(), (torch.randn(4, 9, 3),), {}


# Independent findings


@pair("HS202")
def random_start_beside_a_plain_list(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = [nn.GRUCell(3, 8)]
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.randn(len(x), 8) if sick else torch.zeros(len(x), 8)
            for step in x.unbind(1):
                h = self.cells[0](step, h)
            return self.head(h)

    return M(), (torch.randn(4, 9, 3),), {} if sick else {"ignore": ["HS205"]}


# Leaks that fade


@pair("HS101")
def start_averaged_over_the_batch(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.gru, self.head = nn.Linear(3, 8), nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            h0 = torch.tanh(self.start(x[:, 0]))
            h0 = h0.mean(0, keepdim=True).expand_as(h0) if sick else h0
            return self.head(self.gru(x, h0.unsqueeze(0).contiguous())[1][-1])

    return M(), (torch.randn(4, 40, 3),), {}


# Parts that never change


@pair("HS405")
def cell_state_that_never_changes(sick):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size, self.gates = 3, 8, nn.Linear(11, 32)

        def forward(self, x, state):
            h, c = state
            i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            new = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * new.tanh()
            return h, (h, c if sick else new)

    return Cell(), (), {}


# Resets by other names, and states that are kept by design


def kept(method: str | None, *, inner: bool = False) -> type[nn.Module]:
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head, self.h = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2), None

        def forward(self, x):
            out, h = self.gru(x, self.h)
            self.h = h.detach()
            return self.head(out)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Keeping()

        def forward(self, x):
            return self.inner(x)

    if method:
        setattr(Keeping, method, lambda self: setattr(self, "h", None))
    return Outer if inner else Keeping


@pair("HS201")
def reset_states(sick):
    return kept(None if sick else "reset_states")(), (torch.randn(4, 9, 3),), {}


@pair("HS201")
def init_sequence(sick):
    return kept(None if sick else "init_sequence")(), (torch.randn(4, 9, 3),), {}


@pair("HS201")
def reset_of_a_submodule(sick):
    return kept(None if sick else "reset", inner=True)(), (torch.randn(4, 9, 3),), {}


@pair("HS201")
def clear_memory(sick):
    return kept(None if sick else "clear_memory")(), (torch.randn(4, 9, 3),), {}


@pair("HS202")
def random_state_kept_out_of_sight(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.head = nn.Linear(11, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.randn(len(x), 8) if sick else torch.zeros(len(x), 8)
            for step in x.unbind(1):
                h = torch.tanh(self.mix(torch.cat([step, h], 1)))
            return self.head(h)

    return M(), (torch.randn(4, 5, 3),), {}


# Weakest by code


@pair("HS301")
def activated_twice_over_two_modules(sick):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.h, self.act = nn.Linear(3, 8), nn.Linear(8, 8), nn.Tanh()

        def forward(self, x, h):
            return self.act(self.x(x) + self.h(h))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Cell(), nn.Linear(8, 2)

        def forward(self, x):
            h, outs = x.new_zeros(len(x), 8), []
            for step in x.unbind(1):
                h = self.cell(step, h)
                h = torch.tanh(h) if sick else h
                outs.append(h)
            return self.head(torch.stack(outs, 1))

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS301")
def tanh_of_an_lstm_output(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.head(torch.tanh(out) if sick else out)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS301")
def sigmoid_and_a_loss_with_logits(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head, self.act = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1), nn.Sigmoid()

        def forward(self, x):
            y = self.head(self.rnn(x)[0][:, -1]).squeeze(-1)
            return self.act(y) if sick else y

    return M(), (torch.randn(4, 9, 3),), {"loss": nn.BCEWithLogitsLoss(), "targets": torch.tensor([0.0, 1, 1, 0])}


@pair("HS403")
def units_pruned_away(sick):
    from torch.nn.utils import prune

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.h, self.head = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 2)
            for layer in (self.x, self.h) if sick else ():
                prune.custom_from_mask(
                    layer, "weight", (torch.arange(16) < 6).float().unsqueeze(1).expand_as(layer.weight)
                )

        def forward(self, x):
            h = x.new_zeros(len(x), 16)
            for step in x.unbind(1):
                h = torch.tanh(self.x(step) + self.h(h))
            return self.head(h)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS502")
def linear_recurrence_that_grows(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.full((8,), 1.4 if sick else 0.95))
            self.b, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), 8)
            for step in x.unbind(1):
                h = self.a * h + self.b(step)
            return self.head(h)

    return M(), (torch.randn(4, 40, 3),), {}


@pair("HS205")
def parameters_in_a_plain_list(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            weights = [nn.Parameter(0.3 * torch.randn(3, 8)), nn.Parameter(0.3 * torch.randn(8, 8))]
            self.weights = weights if sick else nn.ParameterList(weights)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            h = x.new_zeros(len(x), 8)
            for step in x.unbind(1):
                h = torch.tanh(step @ self.weights[0] + h @ self.weights[1])
            return self.head(h)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS205")
def weight_kept_as_a_plain_tensor(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
            recurrent = 0.3 * torch.randn(8, 8)
            if sick:
                self.w_hh = recurrent
            else:
                self.w_hh = nn.Parameter(recurrent)

        def forward(self, x):
            h = x.new_zeros(len(x), 8)
            for step in x.unbind(1):
                h = torch.tanh(self.x(step) + h @ self.w_hh)
            return self.head(h)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS206")
def start_overwritten_in_forward(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.initial, self.lstm = nn.Parameter(torch.randn(2, 1, 8)), nn.LSTM(3, 8, batch_first=True)

        def forward(self, x):
            h, c = (part.expand(1, len(x), 8).contiguous() for part in self.initial.unsqueeze(1))
            if sick:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            return self.lstm(x, (h, c))[0]

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS103")
def state_dropped_between_two_modules(sick):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 8, batch_first=True)

        def forward(self, x, state=None):
            out, new = self.rnn(x, None if sick else state)
            return out, new

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = Encoder(), nn.Linear(8, 2)

        def forward(self, x):
            state, outs = None, []
            for piece in x.split(3, 1):
                out, state = self.encoder(piece, state)
                outs.append(out)
            return self.head(torch.cat(outs, 1))

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS104")
def input_of_the_first_step_at_every_step(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            h, outs = x.new_zeros(len(x), 8), []
            for t in range(x.shape[1]):
                h = self.cell(x[:, 0 if sick else t], h)
                outs.append(self.head(h))
            return torch.stack(outs, 1)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS104")
def input_of_the_step_before(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = c = x.new_zeros(len(x), 8)
            outs = []
            for t in range(x.shape[1]):
                outs.append(self.head(h)) if sick else None
                h, c = self.cell(x[:, t], (h, c))
                outs.append(self.head(h)) if not sick else None
            return torch.stack(outs, 1)

    return M(), (torch.randn(4, 9, 3),), {}


# One mistake in three kinds of layer


def kept_graph(kind: type[nn.RNNBase], sick: bool) -> Case:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head, self.state = kind(3, 8, batch_first=True), nn.Linear(8, 2), None  # type: ignore[call-arg]

        def reset_state(self):
            self.state = None

        def forward(self, x):
            out, self.state = self.rnn(x, self.state)
            if not sick:
                lone = isinstance(self.state, Tensor)
                self.state = self.state.detach() if lone else tuple(part.detach() for part in self.state)
            return self.head(out)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS203")
def graph_of_a_gru_kept(sick):
    return kept_graph(nn.GRU, sick)


@pair("HS203")
def graph_of_an_rnn_kept(sick):
    return kept_graph(nn.RNN, sick)


@pair("HS305")
def dropout_of_a_single_rnn(sick):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.RNN(3, 8, dropout=0.1 if sick else 0.0, batch_first=True)
    return nn.Sequential(layer), (torch.randn(4, 9, 3),), {}


class Constant(nn.Module):
    """Something of the input is left over beside the layer, so that it is not ignored."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]) + x.mean(-1, keepdim=True)


@pair("HS404")
def input_weights_of_zero_in_a_gru(sick):
    model = Constant(nn.GRU(3, 8, batch_first=True))
    if sick:
        nn.init.zeros_(model.rnn.weight_ih_l0)
    return model, (torch.randn(4, 9, 3),), {}


@pair("HS404")
def input_weights_of_zero_in_an_rnn(sick):
    model = Constant(nn.RNN(3, 8, batch_first=True))
    if sick:
        nn.init.zeros_(model.rnn.weight_ih_l0)
    return model, (torch.randn(4, 9, 3),), {}


@pair("HS404")
def input_weights_of_zero_in_an_lstm(sick):
    model = Constant(nn.LSTM(3, 8, batch_first=True))
    if sick:
        nn.init.zeros_(model.rnn.weight_ih_l0)
    return model, (torch.randn(4, 9, 3),), {}


@pair("HS104")
def tokens_made_of_fractions(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.rnn(self.embed((x if sick else 20 * x).long()))[0][:, -1])

    return M(), (torch.rand(4, 9),), {}


class OldState(nn.Module):
    """Returns the state it was given, or the new one."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.sick = 3, 8, sick
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(self.i2h(x) + self.h2h(h))
        return new, h if self.sick else new


@pair("HS405")
def cell_that_returns_its_old_state(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.h0 = OldState(sick), nn.Parameter(torch.randn(1, 8))

        def forward(self, x):
            h, outs = self.h0.expand(len(x), -1), []
            for step in x.unbind(1):
                out, h = self.cell(step, h)
                outs.append(out)
            return torch.stack(outs, 1)

    return M(), (torch.randn(4, 9, 3),), {}


@pair("HS405")
def update_gate_that_is_shut(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.start, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(4, 8), nn.Linear(8, 2)
            if sick:
                nn.init.constant_(self.gru.bias_ih_l0[8:16], 200.0)

        def forward(self, x):
            h0 = torch.tanh(self.start(x[:, 0])).unsqueeze(0).contiguous()
            return self.head(self.gru(x, h0)[0])

    return M(), (torch.randn(4, 9, 4),), {}


@pair("HS501")
def forget_gate_that_is_shut(sick):
    model = nn.LSTM(3, 8, batch_first=True)
    if sick:
        with torch.no_grad():
            model.bias_ih_l0[8:16] = -6.0
    return model, (torch.randn(4, 15, 3),), {}


@pair("HS504")
def encoder_alone_in_the_optimizer(sick):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.GRU(3, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

        def forward(self, x):
            return self.decoder(self.encoder(x)[0])[0]

    model = M()
    optimizer = torch.optim.Adam(model.encoder.parameters())
    if not sick:
        optimizer.add_param_group({"params": list(model.decoder.parameters())})
    return model, (torch.randn(4, 9, 3),), {"optimizer": optimizer}
