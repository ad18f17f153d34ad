"""Tricky: decoders, whose next input is what they said, or what a coin says."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, drawn_tokens, normal, series, setting, tokens

case = Family("decoders")


class CoinDecoder(nn.Module):
    """Teacher forcing by a coin, tossed for each step."""

    def __init__(self, toss="random"):
        super().__init__()
        self.emb, self.cell, self.out = (
            nn.Embedding(VOCAB, FEATURES),
            nn.GRUCell(FEATURES, UNITS),
            nn.Linear(UNITS, VOCAB),
        )
        self.toss, self.ratio = toss, 0.5

    def coin(self):
        if self.toss == "random":
            return random.random() < self.ratio
        return torch.rand(1).item() < self.ratio

    def forward(self, trg):
        h = self.out.weight.new_zeros(trg.size(0), UNITS)
        inp, logits = trg[:, 0], []
        for t in range(1, trg.size(1)):
            h = self.cell(self.emb(inp), h)
            logit = self.out(h)
            logits.append(logit)
            inp = trg[:, t] if self.coin() else logit.argmax(1)
        return torch.stack(logits, 1)


WHY = "teacher forcing by a coin: the body changes between steps and calls"
case(tokens(), name="teacher_forcing_by_random", expect="leave", why=WHY, later=setting(ratio=0.0), least=2)(
    CoinDecoder
)
case(
    tokens(),
    name="teacher_forcing_by_torch",
    builder=lambda: CoinDecoder("torch"),
    expect="leave",
    why=WHY,
    least=2,
    doubles=False,
)(CoinDecoder)
case(
    tokens(),
    name="teacher_forcing_always",
    builder=lambda: setattr(made := CoinDecoder(), "ratio", 2.0) or made,
    expect="leave",
    why="the coin always falls the same way, but nobody can know",
    later=setting(ratio=0.0),
    least=2,
)(CoinDecoder)


@case(tokens(), expect="may", why="a coin per row as a tensor, and argmax of what was said", least=2, doubles=False)
class ScheduledSampling(CoinDecoder):
    def forward(self, trg):
        h = self.out.weight.new_zeros(trg.size(0), UNITS)
        inp, logits = trg[:, 0], []
        for t in range(1, trg.size(1)):
            h = self.cell(self.emb(inp), h)
            logits.append(self.out(h))
            coin = torch.rand(trg.size(0)) < self.ratio
            inp = torch.where(coin, trg[:, t], logits[-1].argmax(1))
        return torch.stack(logits, 1)


class FreeRunning(nn.Module):
    """Generates from a prompt of one token; what it says is its next input."""

    def __init__(self, draw="greedy", steps=9):
        super().__init__()
        self.emb, self.cell, self.out = (
            nn.Embedding(VOCAB, FEATURES),
            nn.GRUCell(FEATURES, UNITS),
            nn.Linear(UNITS, VOCAB),
        )
        self.draw, self.steps = draw, steps

    def forward(self, prompt):
        h, tok, said, logits = None, prompt[:, 0], [], []
        for _ in range(self.steps):
            h = self.cell(self.emb(tok), h)
            logit = self.out(h)
            tok = logit.argmax(-1) if self.draw == "greedy" else torch.multinomial(F.softmax(logit, -1), 1).squeeze(1)
            said.append(tok)
            logits.append(logit)
        return torch.stack(said, 1), torch.stack(logits, 1)


case(tokens(), name="greedy_decoder", expect="may", why="what is said comes back as a token", later=setting(steps=4))(
    FreeRunning
)
case(
    tokens(),
    name="sampling_decoder",
    builder=lambda: FreeRunning("sample"),
    expect="may",
    why="drawn tokens come back",
    doubles=False,
)(FreeRunning)


@case(tokens(), expect="leave", why="ends when every row has said the end", grads=False)
class StopsAtTheEnd(FreeRunning):
    @torch.no_grad()
    def forward(self, prompt):
        h, tok = None, prompt[:, 0]
        done, said = torch.zeros_like(tok, dtype=torch.bool), []
        for _ in range(20):
            h = self.cell(self.emb(tok), h)
            tok = self.out(h).argmax(-1).masked_fill(done, 0)
            said.append(tok)
            done |= tok == 6
            if done.all():
                break
        return torch.stack(said, 1)


@case(series(), expect="may", why="back pointers, then a second loop that follows them", grads=False)
class Viterbi(nn.Module):
    def __init__(self, tags=5):
        super().__init__()
        self.emit, self.transitions = nn.Linear(FEATURES, tags), nn.Parameter(torch.randn(tags, tags))

    @torch.no_grad()
    def forward(self, x):
        emissions = self.emit(x)
        score, pointers = emissions[:, 0], []
        for t in range(1, emissions.size(1)):
            best, index = (score.unsqueeze(2) + self.transitions).max(dim=1)
            score = best + emissions[:, t]
            pointers.append(index)
        tag = score.argmax(1)
        path = [tag]
        for index in reversed(pointers):
            tag = index.gather(1, tag[:, None]).squeeze(1)
            path.append(tag)
        return torch.stack(path[::-1], 1), score


def _with_goal(batch, steps):
    return drawn_tokens(batch, steps), normal(batch, UNITS)


@case(_with_goal, expect="may", why="beams by topk and gather: the state is reordered in each step")
class BeamSearch(nn.Module):
    def __init__(self, width=3, steps=6):
        super().__init__()
        self.emb, self.cell, self.out = (
            nn.Embedding(VOCAB, FEATURES),
            nn.GRUCell(FEATURES, UNITS),
            nn.Linear(UNITS, VOCAB),
        )
        self.width, self.steps = width, steps

    def forward(self, prompt, goal):
        B, K = prompt.size(0), self.width
        h, tok = goal.repeat_interleave(K, 0), prompt[:, :1].expand(B, K)
        score = goal.new_zeros(B, K)
        for _ in range(self.steps):
            h = self.cell(self.emb(tok.reshape(-1)), h)
            total = score.unsqueeze(-1) + F.log_softmax(self.out(h), -1).view(B, K, VOCAB)
            score, flat = total.view(B, -1).topk(K, dim=1)
            parent, tok = flat // VOCAB, flat % VOCAB
            h = h.view(B, K, UNITS).gather(1, parent.unsqueeze(-1).expand(-1, -1, UNITS)).view(B * K, UNITS)
        return score, tok
