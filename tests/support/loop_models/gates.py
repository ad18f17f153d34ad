"""Gated cells as tutorials, blogs and papers' code write them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, normal, series, time_first, tokens

case = Family("gates")


class CharRNNCell(nn.Module):
    def __init__(self, n_embd, n_embd2):
        super().__init__()
        self.xh_to_h = nn.Linear(n_embd + n_embd2, n_embd2)

    def forward(self, xt, hprev):
        xh = torch.cat([xt, hprev], dim=1)
        ht = F.tanh(self.xh_to_h(xh))
        return ht


class CharGRUCell(nn.Module):
    """Each gate reads the same concatenation; the reset acts on the state before the candidate."""

    def __init__(self, n_embd, n_embd2):
        super().__init__()
        self.xh_to_z = nn.Linear(n_embd + n_embd2, n_embd2)
        self.xh_to_r = nn.Linear(n_embd + n_embd2, n_embd2)
        self.xh_to_hbar = nn.Linear(n_embd + n_embd2, n_embd2)

    def forward(self, xt, hprev):
        xh = torch.cat([xt, hprev], dim=1)
        r = F.sigmoid(self.xh_to_r(xh))
        hprev_reset = r * hprev
        xhr = torch.cat([xt, hprev_reset], dim=1)
        hbar = F.tanh(self.xh_to_hbar(xhr))
        z = F.sigmoid(self.xh_to_z(xh))
        return (1 - z) * hprev + z * hbar


class CharModel(nn.Module):
    def __init__(self, cell_type):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, UNITS))
        self.wte = nn.Embedding(VOCAB, 10)
        self.cell = CharRNNCell(10, UNITS) if cell_type == "rnn" else CharGRUCell(10, UNITS)
        self.lm_head = nn.Linear(UNITS, VOCAB)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        emb = self.wte(idx)
        hprev = self.start.expand((b, -1))
        hiddens = []
        for i in range(t):
            xt = emb[:, i, :]
            ht = self.cell(xt, hprev)
            hprev = ht
            hiddens.append(ht)
        hidden = torch.stack(hiddens, 1)
        logits = self.lm_head(hidden)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


case(tokens(), name="char_rnn", builder=lambda: CharModel("rnn"))(CharModel)
case(tokens(), name="char_gru", builder=lambda: CharModel("gru"))(CharModel)


def _tokens_and_targets(batch, steps):
    (idx,) = tokens()(batch, steps)
    return idx, idx.roll(-1, 1)


case(_tokens_and_targets, name="char_gru_with_its_loss", builder=lambda: CharModel("gru"))(CharModel)


class CustomLSTMCell(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(4 * hidden_size, input_size) * 0.2)
        self.weight_hh = nn.Parameter(torch.randn(4 * hidden_size, hidden_size) * 0.2)
        self.bias_ih = nn.Parameter(torch.randn(4 * hidden_size) * 0.1)
        self.bias_hh = nn.Parameter(torch.randn(4 * hidden_size) * 0.1)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hx, cx = state
        gates = torch.mm(input, self.weight_ih.t()) + self.bias_ih + torch.mm(hx, self.weight_hh.t()) + self.bias_hh
        ingate, forgetgate, cellgate, outgate = gates.chunk(4, 1)
        ingate = torch.sigmoid(ingate)
        forgetgate = torch.sigmoid(forgetgate)
        cellgate = torch.tanh(cellgate)
        outgate = torch.sigmoid(outgate)
        cy = (forgetgate * cx) + (ingate * cellgate)
        hy = outgate * torch.tanh(cy)
        return hy, (hy, cy)


class LayerNormLSTMCell(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.randn(4 * hidden_size, hidden_size))
        self.layernorm_i = nn.LayerNorm(4 * hidden_size)
        self.layernorm_h = nn.LayerNorm(4 * hidden_size)
        self.layernorm_c = nn.LayerNorm(hidden_size)

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hx, cx = state
        igates = self.layernorm_i(torch.mm(input, self.weight_ih.t()))
        hgates = self.layernorm_h(torch.mm(hx, self.weight_hh.t()))
        i, f, g, o = (igates + hgates).chunk(4, 1)
        cy = self.layernorm_c(f.sigmoid() * cx + i.sigmoid() * g.tanh())
        hy = o.sigmoid() * cy.tanh()
        return hy, (hy, cy)


class ScriptedStyleLayer(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(FEATURES, UNITS)

    def forward(self, input: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state = (input.new_zeros(input.size(1), UNITS), input.new_zeros(input.size(1), UNITS))
        inputs = input.unbind(0)
        outputs: list[Tensor] = []
        for i in range(len(inputs)):
            out, state = self.cell(inputs[i], state)
            outputs += [out]
        return torch.stack(outputs), state


case(time_first(), name="custom_lstm", builder=lambda: ScriptedStyleLayer(CustomLSTMCell))(ScriptedStyleLayer)
case(time_first(), name="layer_norm_lstm", builder=lambda: ScriptedStyleLayer(LayerNormLSTMCell))(ScriptedStyleLayer)


class ReverseScriptedLayer(ScriptedStyleLayer):
    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        inputs = list(reversed(input.unbind(0)))
        outputs: list[Tensor] = []
        for i in range(len(inputs)):
            out, state = self.cell(inputs[i], state)
            outputs += [out]
        return torch.stack(list(reversed(outputs))), state


@case(time_first())
class BidirectionalScriptedLSTM(nn.Module):
    """Both directions, each a layer of its own, from given states."""

    def __init__(self) -> None:
        super().__init__()
        self.there = ScriptedStyleLayer(CustomLSTMCell)
        self.back = ReverseScriptedLayer(CustomLSTMCell)

    def forward(self, x: Tensor) -> Tensor:
        there, state = self.there(x)
        back, _ = self.back(x, state)
        return torch.cat([there, back], -1)


@case(series())
class MinimalLSTM(nn.Module):
    """One linear map over the concatenation, chunked."""

    def __init__(self, input_size=FEATURES, hidden_size=UNITS):
        super().__init__()
        self.hidden_size = hidden_size
        self.gates = nn.Linear(input_size + hidden_size, hidden_size * 4)
        self.fc = nn.Linear(hidden_size, 3)

    def forward(self, x):
        bs, seq_len, _ = x.shape
        h = torch.zeros(bs, self.hidden_size).to(x)
        c = torch.zeros(bs, self.hidden_size).to(x)
        for t in range(seq_len):
            i, f, o, g = self.gates(torch.cat((x[:, t], h), dim=1)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.fc(h)


@case(series())
class CustomLSTMFromTheBlog(nn.Module):
    """Matrices W, U and bias with slices of the gates; outputs unsqueezed, then cat and transpose."""

    def __init__(self, input_sz=FEATURES, hidden_sz=UNITS):
        super().__init__()
        self.input_sz, self.hidden_size = input_sz, hidden_sz
        self.W = nn.Parameter(torch.Tensor(input_sz, hidden_sz * 4))
        self.U = nn.Parameter(torch.Tensor(hidden_sz, hidden_sz * 4))
        self.bias = nn.Parameter(torch.Tensor(hidden_sz * 4))
        self.init_weights()

    def init_weights(self):
        stdv = 1.0 / math.sqrt(self.hidden_size)
        for weight in self.parameters():
            weight.data.uniform_(-stdv, stdv)

    def forward(self, x, init_states=None):
        bs, seq_sz, _ = x.size()
        hidden_seq = []
        if init_states is None:
            h_t, c_t = (
                torch.zeros(bs, self.hidden_size, dtype=x.dtype).to(x.device),
                torch.zeros(bs, self.hidden_size, dtype=x.dtype).to(x.device),
            )
        else:
            h_t, c_t = init_states
        HS = self.hidden_size
        for t in range(seq_sz):
            x_t = x[:, t, :]
            gates = x_t @ self.W + h_t @ self.U + self.bias
            i_t, f_t, g_t, o_t = (
                torch.sigmoid(gates[:, :HS]),
                torch.sigmoid(gates[:, HS : HS * 2]),
                torch.tanh(gates[:, HS * 2 : HS * 3]),
                torch.sigmoid(gates[:, HS * 3 :]),
            )
            c_t = f_t * c_t + i_t * g_t
            h_t = o_t * torch.tanh(c_t)
            hidden_seq.append(h_t.unsqueeze(0))
        hidden_seq = torch.cat(hidden_seq, dim=0)
        hidden_seq = hidden_seq.transpose(0, 1).contiguous()
        return hidden_seq, (h_t, c_t)


def _series_and_states(batch, steps):
    states = normal(batch, UNITS, salt=1), normal(batch, UNITS, salt=2)
    return normal(batch, steps, FEATURES), states


case(_series_and_states, name="custom_lstm_from_a_given_state")(CustomLSTMFromTheBlog)


@case(series())
class NaiveLSTM(nn.Module):
    """Sixteen parameters, one per gate and side."""

    def __init__(self):
        super().__init__()
        for gate in "ifgo":
            self.register_parameter(f"W_i{gate}", nn.Parameter(torch.randn(FEATURES, UNITS) * 0.3))
            self.register_parameter(f"W_h{gate}", nn.Parameter(torch.randn(UNITS, UNITS) * 0.3))
            self.register_parameter(f"b_{gate}", nn.Parameter(torch.zeros(UNITS)))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], UNITS)
        seq = []
        for t in range(x.shape[1]):
            xt = x[:, t]
            it = torch.sigmoid(xt @ self.W_ii + h @ self.W_hi + self.b_i)
            ft = torch.sigmoid(xt @ self.W_if + h @ self.W_hf + self.b_f)
            gt = torch.tanh(xt @ self.W_ig + h @ self.W_hg + self.b_g)
            ot = torch.sigmoid(xt @ self.W_io + h @ self.W_ho + self.b_o)
            c = ft * c + it * gt
            h = ot * torch.tanh(c)
            seq.append(h)
        return torch.stack(seq, dim=1), (h, c)


@case(series())
class PeepholeLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.x2g = nn.Linear(FEATURES, 4 * UNITS)
        self.h2g = nn.Linear(UNITS, 4 * UNITS, bias=False)
        self.p_i, self.p_f, self.p_o = (nn.Parameter(torch.randn(UNITS) * 0.1) for _ in range(3))

    def forward(self, x):
        xs = self.x2g(x)
        h, c = x.new_zeros(2, x.size(0), UNITS)
        ys = []
        for x_t in xs.transpose(0, 1):
            i, f, g, o = (x_t + self.h2g(h)).split(UNITS, dim=-1)
            f = torch.sigmoid(f + self.p_f * c)
            i = torch.sigmoid(i + self.p_i * c)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o + self.p_o * c) * torch.tanh(c)
            ys.append(h)
        return torch.stack(ys).transpose(0, 1)


@case(series())
class CoupledGateLSTM(nn.Module):
    """The forget gate is what the input gate leaves; the output is projected back into the state."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(FEATURES + 8, 3 * UNITS)
        self.proj = nn.Linear(UNITS, 8, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        r, c = x.new_zeros(B, 8), x.new_zeros(B, UNITS)
        out = x.new_zeros(B, T, 8)
        for t in range(T):
            i, j, o = torch.chunk(self.lin(torch.cat([x[:, t], r], -1)), 3, -1)
            i = i.sigmoid()
            c = (1 - i) * c + i * j.tanh()
            r = self.proj(o.sigmoid() * c.tanh())
            out[:, t] = r
        return out


@case(tokens())
class MultiplicativeLSTM(nn.Module):
    """mLSTM of the sentiment neuron: the state meets the input before the gates."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, FEATURES)
        self.wx, self.wh = nn.Linear(FEATURES, 4 * UNITS), nn.Linear(UNITS, 4 * UNITS, bias=False)
        self.wmx, self.wmh = nn.Linear(FEATURES, UNITS, bias=False), nn.Linear(UNITS, UNITS, bias=False)
        self.h2o = nn.Linear(UNITS, VOCAB)

    def forward(self, seq):
        h = c = torch.zeros(seq.size(0), UNITS, dtype=self.h2o.weight.dtype)
        logits = []
        for char in seq.t():
            x = self.embed(char)
            m = self.wmx(x) * self.wmh(h)
            i, f, o, u = torch.chunk(self.wx(x) + self.wh(m), 4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(c)
            logits.append(self.h2o(h))
        return torch.stack(logits, 1)


@case(series())
class GRUFromThePaper(nn.Module):
    """W_xz, W_hz, ...: the notation of a textbook, with the last state only."""

    def __init__(self, num_inputs=FEATURES, num_hiddens=UNITS, sigma=0.2):
        super().__init__()

        def init_weight(*shape):
            return nn.Parameter(torch.randn(*shape) * sigma)

        def triple():
            return (
                init_weight(num_inputs, num_hiddens),
                init_weight(num_hiddens, num_hiddens),
                nn.Parameter(torch.zeros(num_hiddens)),
            )

        self.W_xz, self.W_hz, self.b_z = triple()
        self.W_xr, self.W_hr, self.b_r = triple()
        self.W_xh, self.W_hh, self.b_h = triple()

    def forward(self, inputs, H=None):
        if H is None:
            H = torch.zeros((inputs.shape[0], self.W_hz.shape[0]), dtype=inputs.dtype)
        outputs = []
        for X in inputs.permute(1, 0, 2):
            Z = torch.sigmoid(torch.matmul(X, self.W_xz) + torch.matmul(H, self.W_hz) + self.b_z)
            R = torch.sigmoid(torch.matmul(X, self.W_xr) + torch.matmul(H, self.W_hr) + self.b_r)
            H_tilde = torch.tanh(torch.matmul(X, self.W_xh) + torch.matmul(R * H, self.W_hh) + self.b_h)
            H = Z * H + (1 - Z) * H_tilde
            outputs.append(H)
        return outputs, H


@case(series())
class MinimalGatedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.forget = nn.Linear(FEATURES + UNITS, UNITS)
        self.cand = nn.Linear(FEATURES + UNITS, UNITS)

    def step(self, x, h):
        f = torch.sigmoid(self.forget(torch.cat([h, x], 1)))
        h_hat = torch.tanh(self.cand(torch.cat([f * h, x], 1)))
        return torch.lerp(h, h_hat, f)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0, :1]).repeat(1, UNITS)
        for x_t in torch.unbind(x, dim=1):
            h = self.step(x_t, h)
        return h
