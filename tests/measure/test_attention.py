import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.pool import Attention
from tests.support.untouched import untouched

B, T, H = 3, 7, 6


class Reader(nn.Module):
    """States, and a head that a subclass writes; what it weighs by is kept for the test."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.gru, self.score = nn.GRU(2, H, batch_first=batch_first), nn.Linear(H, 1)
        self.query = nn.Linear(H, H)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h, _ = self.gru(x)
        context, self.expected = self.attend(h)
        return self.drop(context)


class Additive(Reader):
    def attend(self, h):
        weights = torch.softmax(self.score(torch.tanh(self.query(h))).squeeze(-1), dim=1)
        return (weights.unsqueeze(-1) * h).sum(dim=1), weights


class ByModule(Reader):
    def __init__(self):
        super().__init__()
        self.soft = nn.Softmax(dim=1)

    def attend(self, h):
        weights = self.soft(self.score(h))
        return torch.bmm(weights.transpose(1, 2), h).squeeze(1), weights.squeeze(2)


class ByHand(Reader):
    def attend(self, h):
        e = torch.exp(self.score(h)[..., 0])
        weights = e / e.sum(1, keepdim=True)
        return torch.einsum("bt,bth->bh", weights, h), weights


class TimeFirst(Reader):
    def __init__(self):
        super().__init__(batch_first=False)

    def attend(self, h):
        weights = self.score(h).softmax(0)  # (time, batch, 1)
        return (weights * h).sum(0), weights[..., 0].T


class Dot(Reader):
    def attend(self, h):
        q = self.query(h[:, -1:])
        weights = (q @ h.transpose(1, 2)).div(H**0.5).softmax(-1)  # (batch, 1, time)
        return nn.functional.scaled_dot_product_attention(q, h, h).squeeze(1), weights.squeeze(1)


@pytest.mark.parametrize("kind", [Additive, ByModule, ByHand, TimeFirst, Dot])
def test_the_weights_of_an_unmodified_model_are_captured(kind):
    model = kind().train()
    x = torch.randn(T, B, 2) if kind is TimeFirst else torch.randn(B, T, 2)
    (found,) = hs.measure.attention(model, x)
    assert found.weights.shape == (B, 1, T)
    model.eval()(x)
    torch.testing.assert_close(found.weights[:, 0], model.expected.detach())
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(B, 1))
    assert found.where.startswith("test_attention.py:")
    hs.plot.attention(found.weights[:, 0])


class Fast(Reader):
    def __init__(self):
        super().__init__()
        self.heads = nn.MultiheadAttention(H, 2, batch_first=True)

    def attend(self, h):
        _, self.each = self.heads(h, h, h, average_attn_weights=False)
        return self.heads(h, h, h, need_weights=False)[0].mean(1), None


def test_torchs_own_attention_shows_its_heads():
    model, x = Fast().eval(), torch.randn(B, T, 2)
    found = hs.measure.attention(model, x)
    model(x)
    assert found[0].weights.shape == (B, 2 * T, T)  # each head at each step
    torch.testing.assert_close(found[0].weights.reshape(B, 2, T, T), model.each.detach(), rtol=1e-4, atol=1e-5)


class Decoder(nn.Module):
    """Looks at the encoder's steps once for each of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.cell = nn.GRU(2, H, batch_first=True), nn.GRUCell(H, H)

    def forward(self, x, steps):
        h, last = self.encoder(x)
        state, looks = last[0], []
        for _ in range(steps):
            weights = (h @ state.unsqueeze(2)).squeeze(2).softmax(1)
            looks.append(weights)
            state = self.cell((weights.unsqueeze(2) * h).sum(1), state)
        self.looks = torch.stack(looks, dim=1)
        return state


def test_the_looks_of_a_decoder_are_stacked():
    model, x = Decoder(), torch.randn(B, T, 2)
    (found,) = hs.measure.attention(model, x, steps=4)
    model(x, 4)
    torch.testing.assert_close(found.weights, model.looks.detach())
    assert "3 rows, 4 looks each at 7 steps (softmax, test_attention.py" in str(found)


def test_our_own_head_is_seen_too_with_padding_at_zero():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.pool = nn.GRU(2, H, batch_first=True), Attention(H)

        def forward(self, x, lengths):
            return self.pool(self.gru(x)[0], lengths)

    (found, *_) = hs.measure.attention(Pooled(), torch.randn(2, T, 2), [T, 3])
    assert found.weights[1, 0, 3:].tolist() == [0] * 4


def test_the_model_comes_back_untouched():
    model, x = Additive().train(), torch.randn(B, T, 2)
    model(x)
    with untouched(model):
        hs.measure.attention(model, x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.GRU(2, 4, batch_first=True), "no weights over the 7 steps of the recurrent layers were seen"),
        (nn.Sequential(nn.Linear(2, 4), nn.Softmax(1)), "no recurrent layer"),
    ],
)
def test_a_model_that_weighs_nothing_is_said_to(model, message):
    with pytest.raises(hs.errors.HiddenStateError, match=message):
        hs.measure.attention(model, torch.randn(B, T, 2))


def test_classes_are_no_steps():
    class Classes(Additive):
        def __init__(self):
            super().__init__()
            self.classes = nn.Linear(H, 5)

        def forward(self, x):
            return self.classes(super().forward(x)).softmax(1)

    assert len(hs.measure.attention(Classes(), torch.randn(B, T, 2))) == 1


def test_bad_input_names_what_was_found():
    with pytest.raises(BadInput, match="keeps its weights to itself"):
        hs.measure.attention(nn.GRU(2, 4, batch_first=True), torch.randn(B, T, 2))


class LinearScore(nn.Module):
    """A decoder whose score is linear, so that softmax forgets who asks: a mistake that looks like attention."""

    def __init__(self, time_first):
        super().__init__()
        self.time = 0 if time_first else 1
        self.encoder = nn.GRU(3, 4, batch_first=not time_first)
        self.cell, self.score = nn.GRUCell(4, 4), nn.Linear(8, 1)

    def forward(self, x):
        states, h = self.encoder(x)
        h, outputs = h[0], []
        for _ in range(5):
            asked = h.unsqueeze(self.time).expand_as(states)
            weights = torch.softmax(self.score(torch.cat([states, asked], dim=2)), dim=self.time)
            h = self.cell((weights * states).sum(self.time), h)
            outputs.append(h)
        return torch.stack(outputs, dim=self.time)


@pytest.mark.parametrize("time_first", [True, False])
def test_looks_that_are_alike_are_all_there_and_said_to_be(time_first):
    x = torch.randn(7, 3, 3) if time_first else torch.randn(3, 7, 3)
    (found,) = hs.measure.attention(LinearScore(time_first), x)
    assert found.weights.shape == (3, 5, 7)
    assert "all looks are alike: what asks does not matter" in str(found)


def test_a_data_set_is_told_to_be_many_calls():
    with pytest.raises(BadInput, match="those of one call, but this is DataLoader: give one batch of it"):
        hs.measure.attention(nn.GRU(3, 4), torch.utils.data.DataLoader([torch.randn(5, 3)]))
