"""Steps that read a memory: attention, pointers, world models, matrices and images as states."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, normal, series, source_and_target, two_series

case = Family("memories")


class Attention(nn.Module):
    """Additive attention over a fixed memory."""

    def __init__(self):
        super().__init__()
        self.W, self.U, self.v = nn.Linear(UNITS, 8), nn.Linear(UNITS, 8, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, query, memory):
        energy = self.v(torch.tanh(self.W(query).unsqueeze(1) + self.U(memory))).squeeze(2)
        weights = F.softmax(energy, dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


@case(source_and_target)
class BahdanauDecoder(nn.Module):
    """Attention over what nn.GRU made of the source; the weights are collected too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, FEATURES)
        self.encoder = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.attention = Attention()
        self.gru = nn.GRU(FEATURES + UNITS, UNITS, batch_first=True)
        self.out = nn.Linear(UNITS, VOCAB)

    def forward_step(self, tok, hidden, encoder_outputs):
        embedded = self.embedding(tok)
        context, attn = self.attention(hidden[-1], encoder_outputs)
        output, hidden = self.gru(torch.cat((embedded, context.unsqueeze(1)), dim=2), hidden)
        return self.out(output), hidden, attn

    def forward(self, src, trg):
        encoder_outputs, decoder_hidden = self.encoder(self.embedding(src))
        decoder_outputs, attentions = [], []
        for i in range(trg.size(1)):
            output, decoder_hidden, attn = self.forward_step(trg[:, i : i + 1], decoder_hidden, encoder_outputs)
            decoder_outputs.append(output)
            attentions.append(attn)
        decoder_outputs = F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)
        return decoder_outputs, torch.stack(attentions, dim=1)


@case(source_and_target)
class InputFeeding(nn.Module):
    """Luong's input feeding: the attended output goes into the next step."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, FEATURES)
        self.enc = nn.GRU(FEATURES, UNITS)
        self.cell = nn.LSTMCell(FEATURES + UNITS, UNITS)
        self.W_a, self.W_c = nn.Linear(UNITS, UNITS, bias=False), nn.Linear(2 * UNITS, UNITS, bias=False)

    def forward(self, src, trg):
        memory = self.enc(self.emb(src.t()))[0].transpose(0, 1)
        h, c, feed = memory[:, -1], torch.zeros_like(memory[:, -1]), torch.zeros_like(memory[:, -1])
        outs = []
        for tok in trg.t():
            h, c = self.cell(torch.cat([self.emb(tok), feed], 1), (h, c))
            align = F.softmax(torch.einsum("bsh,bh->bs", memory, self.W_a(h)), -1)
            ctx = torch.einsum("bs,bsh->bh", align, memory)
            feed = torch.tanh(self.W_c(torch.cat([ctx, h], 1)))
            outs.append(feed)
        return torch.stack(outs, 1)


def _points_and_order(batch, steps):
    points = normal(batch, steps, 2)
    return points, points.sum(-1).argsort(1)


@case(_points_and_order, expect="may", why="the memory is as long as the loop, and its length is a number in the step")
class PointerNet(nn.Module):
    """Supervised pointers: what was chosen is masked from then on, the chosen point is gathered as next input."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Linear(2, UNITS), nn.LSTM(UNITS, UNITS, batch_first=True)
        self.cell = nn.LSTMCell(UNITS, UNITS)
        self.W1, self.W2, self.V = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, 1)

    def forward(self, points, order):
        emb = self.embed(points)
        enc, (h, c) = self.encoder(emb)
        h, c = h[-1], c[-1]
        dec_input = torch.zeros_like(emb[:, 0])
        chosen = torch.zeros(points.shape[:2], dtype=torch.bool)
        keys, losses = self.W1(enc), []
        for t in range(order.size(1)):
            h, c = self.cell(dec_input, (h, c))
            scores = self.V(torch.tanh(keys + self.W2(h)[:, None])).squeeze(-1).masked_fill(chosen, -1e9)
            losses.append(F.cross_entropy(scores, order[:, t], reduction="none"))
            chosen = chosen | F.one_hot(order[:, t], points.size(1)).bool()
            dec_input = emb.gather(1, order[:, t].view(-1, 1, 1).expand(-1, 1, UNITS)).squeeze(1)
        return torch.stack(losses, 1)


class WorldModel(nn.Module):
    """RSSM: prior and posterior with drawn latents, dicts of lists of what each step gave."""

    def __init__(self, stoch=4, sample=True):
        super().__init__()
        self.stoch, self.sample = stoch, sample
        self.img_in = nn.Sequential(nn.Linear(stoch + 3, UNITS), nn.ELU())
        self.cell = nn.GRUCell(UNITS, UNITS)
        self.img_out = nn.Linear(UNITS, 2 * stoch)
        self.obs_out = nn.Linear(UNITS + FEATURES, 2 * stoch)

    def initial(self, batch_size, like):
        return {key: like.new_zeros(batch_size, size) for key, size in (("stoch", self.stoch), ("deter", UNITS))}

    def latent(self, stats):
        mean, std = stats.chunk(2, -1)
        std = F.softplus(std) + 0.1
        stoch = mean + std * torch.randn_like(mean) if self.sample else mean
        return {"mean": mean, "std": std, "stoch": stoch}

    def img_step(self, prev, action):
        deter = self.cell(self.img_in(torch.cat([prev["stoch"], action], -1)), prev["deter"])
        return {**self.latent(self.img_out(deter)), "deter": deter}

    def obs_step(self, prev, action, embed):
        prior = self.img_step(prev, action)
        post = self.latent(self.obs_out(torch.cat([prior["deter"], embed], -1)))
        return {**post, "deter": prior["deter"]}, prior

    def forward(self, embed, action):
        state = self.initial(embed.size(0), embed)
        posts, priors = [], []
        for t in range(action.shape[1]):
            state, prior = self.obs_step(state, action[:, t], embed[:, t])
            posts.append(state)
            priors.append(prior)
        stack = lambda rows: {k: torch.stack([row[k] for row in rows], 1) for k in rows[0]}  # noqa: E731
        return stack(posts), stack(priors)


case(two_series, name="world_model", doubles=False)(WorldModel)
case(two_series, name="world_model_of_means", builder=lambda: WorldModel(sample=False))(WorldModel)


def _with_first(batch, steps):
    embed, action = two_series(batch, steps)
    return embed, action, (normal(batch, steps, salt=5) > 1).float()


@case(_with_first, doubles=False)
class DiscreteWorldModel(nn.Module):
    """Categorical latents with straight-through gradients, and episodes that begin anew within the sequence."""

    def __init__(self, groups=3, classes=4):
        super().__init__()
        self.groups, self.classes = groups, classes
        self.gru = nn.GRUCell(groups * classes + 3, UNITS)
        self.post = nn.Linear(UNITS + FEATURES, groups * classes)

    def forward(self, embed, action, is_first):
        B = embed.size(0)
        deter, stoch = embed.new_zeros(B, UNITS), embed.new_zeros(B, self.groups * self.classes)
        deters, logits = [], []
        for e, a, first in zip(embed.unbind(1), action.unbind(1), is_first.unbind(1), strict=True):
            keep = (1.0 - first).unsqueeze(-1)
            deter, stoch, a = deter * keep, stoch * keep, a * keep
            deter = self.gru(torch.cat([stoch, a], -1), deter)
            logit = self.post(torch.cat([deter, e], -1)).view(B, self.groups, self.classes)
            probs = F.softmax(logit, -1)
            index = torch.multinomial(probs.view(-1, self.classes), 1).view(B, self.groups)
            onehot = F.one_hot(index, self.classes).to(probs.dtype)
            stoch = (onehot + probs - probs.detach()).flatten(1)
            deters.append(deter)
            logits.append(logit)
        return torch.stack(deters, 1), torch.stack(logits, 1)


@case(series())
class NeuralTuringMachine(nn.Module):
    """Content addressing, interpolation, circular shift and sharpening; erase and add."""

    def __init__(self, rows=5, width=4):
        super().__init__()
        self.rows, self.width = rows, width
        self.controller = nn.LSTMCell(FEATURES + width, UNITS)
        self.head = nn.Linear(UNITS, width + 1 + 1 + 3 + 1 + 2 * width)
        self.memory_bias = nn.Parameter(torch.randn(rows, width) * 0.1)

    def address(self, k, beta, g, s, gamma, memory, w_prev):
        wc = F.softmax(F.softplus(beta) * F.cosine_similarity(memory + 1e-6, k.unsqueeze(1) + 1e-6, dim=-1), dim=1)
        wg = torch.sigmoid(g) * wc + (1 - torch.sigmoid(g)) * w_prev
        s = F.softmax(s, dim=1)
        ws = sum(s[:, i : i + 1] * torch.roll(wg, i - 1, dims=1) for i in range(3))
        w = ws ** (1 + F.softplus(gamma))
        return w / (w.sum(1, keepdim=True) + 1e-8)

    def forward(self, x):
        B = x.size(0)
        memory = self.memory_bias.repeat(B, 1, 1)
        h = c = x.new_zeros(B, UNITS)
        r = x.new_zeros(B, self.width)
        w = F.one_hot(torch.zeros(B, dtype=torch.long), self.rows).to(x.dtype)
        reads = []
        for t in range(x.size(1)):
            h, c = self.controller(torch.cat([x[:, t], r], 1), (h, c))
            k, beta, g, s, gamma, e, a = self.head(h).split([self.width, 1, 1, 3, 1, self.width, self.width], 1)
            w = self.address(k, beta, g, s, gamma, memory, w)
            memory = memory * (1 - w.unsqueeze(2) * torch.sigmoid(e).unsqueeze(1)) + torch.bmm(
                w.unsqueeze(2), torch.tanh(a).unsqueeze(1)
            )
            r = torch.bmm(w.unsqueeze(1), memory).squeeze(1)
            reads.append(r)
        return torch.stack(reads, 1), memory


@case(series())
class UsageMemory(nn.Module):
    """DNC without links: the least used cell is written, by a sort and a cumulative product."""

    def __init__(self, rows=5, width=4):
        super().__init__()
        self.cell, self.rows, self.width = nn.GRUCell(FEATURES + width, UNITS), rows, width
        self.interface = nn.Linear(UNITS, 2 * width + 2)

    def allocation(self, usage):
        ordered, indices = torch.sort(usage, dim=1)
        products = torch.cumprod(torch.cat([torch.ones_like(ordered[:, :1]), ordered], 1), 1)[:, :-1]
        return torch.zeros_like(usage).scatter(1, indices, (1 - ordered) * products)

    def forward(self, x):
        B = x.size(0)
        state = {
            "h": x.new_zeros(B, UNITS),
            "mem": x.new_zeros(B, self.rows, self.width),
            "usage": x.new_zeros(B, self.rows),
            "read": x.new_zeros(B, self.width),
        }
        for x_t in x.unbind(1):
            h = self.cell(torch.cat([x_t, state["read"]], 1), state["h"])
            key, val, gate, free = self.interface(h).split([self.width, self.width, 1, 1], 1)
            w = torch.sigmoid(gate) * self.allocation(state["usage"])
            usage = (state["usage"] + w - state["usage"] * w) * (1 - 0.1 * torch.sigmoid(free))
            mem = state["mem"] + w[..., None] * val[:, None]
            read = (F.softmax(torch.einsum("brw,bw->br", mem, key), 1)[..., None] * mem).sum(1)
            state = {"h": h, "mem": mem, "usage": usage, "read": read}
        return state["read"], state["usage"]


@case(series())
class StackRNN(nn.Module):
    """A differentiable stack: push, pop and no-op as a mixture of shifted copies."""

    def __init__(self, depth=6):
        super().__init__()
        self.depth = depth
        self.rnn, self.action, self.value = nn.RNNCell(FEATURES + 1, UNITS), nn.Linear(UNITS, 3), nn.Linear(UNITS, 1)

    def forward(self, x):
        h, stack = x.new_zeros(x.size(0), UNITS), x.new_zeros(x.size(0), self.depth)
        tops = []
        for t in range(x.size(1)):
            h = self.rnn(torch.cat([x[:, t], stack[:, :1]], 1), h)
            push, pop, noop = F.softmax(self.action(h), dim=1).unbind(1)
            pushed = torch.cat([torch.sigmoid(self.value(h)), stack[:, :-1]], 1)
            popped = torch.cat([stack[:, 1:], torch.zeros_like(stack[:, :1])], 1)
            stack = push[:, None] * pushed + pop[:, None] * popped + noop[:, None] * stack
            tops.append(stack[:, 0])
        return torch.stack(tops, 1), h


def _video(batch, steps):
    return (normal(batch, steps, 2, 5, 5),)


@case(_video)
class ConvLSTM(nn.Module):
    """Frames in, frames out: the public ConvLSTM with its list of layers and (b, t, c, h, w)."""

    def __init__(self, hidden=4):
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(nn.Conv2d(c + hidden, 4 * hidden, 3, padding=1) for c in (2, hidden))

    def forward(self, input_tensor):
        b, seq_len, _, height, width = input_tensor.size()
        cur_layer_input, last_state_list = input_tensor, []
        for conv in self.cells:
            h = c = input_tensor.new_zeros(b, self.hidden, height, width)
            output_inner = []
            for t in range(seq_len):
                combined = torch.cat([cur_layer_input[:, t, :, :, :], h], dim=1)
                cc_i, cc_f, cc_o, cc_g = torch.split(conv(combined), self.hidden, dim=1)
                c = torch.sigmoid(cc_f) * c + torch.sigmoid(cc_i) * torch.tanh(cc_g)
                h = torch.sigmoid(cc_o) * torch.tanh(c)
                output_inner.append(h)
            cur_layer_input = torch.stack(output_inner, dim=1)
            last_state_list.append([h, c])
        return cur_layer_input, last_state_list


@case(series())
class IndependentMechanisms(nn.Module):
    """RIMs: modules compete for the input by attention, the best two update; a state of rank 3."""

    def __init__(self, units=4, size=6, active=2):
        super().__init__()
        self.k, self.size, self.active = units, size, active
        self.query, self.key = nn.Parameter(torch.randn(units, size, 5) * 0.3), nn.Linear(FEATURES, 5)
        self.wx = nn.Parameter(torch.randn(units, FEATURES, size) * 0.3)
        self.wh = nn.Parameter(torch.randn(units, size, size) * 0.3)
        self.comm = nn.MultiheadAttention(size, 2, batch_first=True)

    def forward(self, x):
        hs = x.new_zeros(x.size(0), self.k, self.size)
        outs = []
        for x_t in x.unbind(1):
            score = torch.einsum("bks,ksd,bd->bk", hs, self.query, self.key(x_t))
            top = torch.topk(score, self.active, dim=1).indices
            mask = torch.zeros_like(score).scatter(1, top, 1.0).unsqueeze(-1)
            new = torch.tanh(torch.einsum("bf,kfs->bks", x_t, self.wx) + torch.einsum("bks,kst->bkt", hs, self.wh))
            talk, _ = self.comm(new, new, new, need_weights=False)
            hs = mask * (new + talk) + (1 - mask) * hs
            outs.append(hs.flatten(1))
        return torch.stack(outs, 1)
