"""One calling convention: however a call is given, every function of ours says the same of it."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.cells import given_call, input_axes
from hiddenstate.errors import BadInput
from tests.support.untouched import untouched


class Tagger(nn.Module):
    """Takes more than a sequence: features along time, and a scale that is not."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, features=None, scale=1.0):
        return self.head(self.rnn(x * scale if features is None else (x + features) * scale)[0])


class ByNameAlone(Tagger):
    def forward(self, *, x, features=None, scale=1.0):
        return super().forward(x, features, scale)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.tagger = Tagger()

    def act(self, x, features, scale):
        return self.tagger(x, features, scale)


def ways(function):
    """The same call of the same weights, given in every way that there is."""
    torch.manual_seed(0)
    x, features, model = torch.randn(4, 9, 3), torch.randn(4, 9, 3), Tagger()
    named, agent = ByNameAlone(), WithoutForward()
    named.load_state_dict(model.state_dict())
    agent.tagger.load_state_dict(model.state_dict())
    with untouched(model), untouched(named), untouched(agent):
        yield function(model, x, features, 2.0)
        yield function(model, x, scale=2.0, features=features)
        yield function(model, scale=2.0, features=features, x=x)
        yield function(named, scale=2.0, x=x, features=features)
        yield function(agent, call=lambda model: model.act(x, features, 2.0))
        yield function(agent, call=lambda model: model.act(scale=2.0, features=features, x=x))
        yield function(agent, x, features, call=lambda model, x, f: model.act(x, f, 2.0))
        yield function(agent, {"f": features, "x": x}, call=lambda model, given: model.act(given["x"], given["f"], 2.0))


def test_memory_is_the_same_however_the_call_is_given():
    first, *others = ways(hs.measure.memory)
    for other in others:
        torch.testing.assert_close(other.curve, first.curve)


def test_two_pieces_are_cut_alike_however_the_call_is_given():
    first, *others = ways(lambda *args, **kwargs: hs.check_split(*args, at=4, **kwargs))
    assert first
    for other in others:
        assert other
        assert other.error == pytest.approx(first.error, abs=1e-6)
        assert (other.axes.time, other.axes.batch) == (1, 0)


def test_the_doctor_and_the_page_take_the_call_too(tmp_path):
    assert all(report.ok for report in ways(hs.diagnose))
    pages = [path.read_text("utf-8") for path in ways(lambda *a, **k: hs.report(*a, path=tmp_path / "page.html", **k))]
    lengths = [re.search(r"<dt>memory</dt><dd>(.*?)</dd>", page)[1] for page in pages]
    assert len(set(lengths)) == 1, lengths
    assert ["<h1>WithoutForward</h1>" in page for page in pages] == [False] * 4 + [True] * 4


class Looking(WithoutForward):
    def act(self, x, features, scale):
        h = self.tagger.rnn(x)[0]
        return (h.mean(2, keepdim=True).softmax(1) * h).sum(1)


def test_attention_is_found_in_a_call_by_a_function():
    x = torch.randn(4, 9, 3)
    (found,) = hs.measure.attention(Looking(), call=lambda model: model.act(x, None, 1.0))
    assert found.weights.shape == (4, 1, 9)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Masked(Packed):
    def forward(self, x, attention_mask):
        return super().forward(x, attention_mask.sum(1))


@pytest.mark.parametrize("kind", ["tensor", "list", "mask"])
def test_lengths_among_the_inputs_are_known_as_such(kind):
    lengths, x = [9, 6, 5, 7], torch.randn(4, 9, 3)
    mask = (torch.arange(9) < torch.tensor(lengths).unsqueeze(1)).long()
    model = Masked() if kind == "mask" else Packed()
    beside = {"tensor": torch.tensor(lengths), "list": lengths, "mask": mask}[kind]
    expected = hs.measure.memory(model.rnn, x, lengths=torch.tensor(lengths)).curve
    torch.testing.assert_close(hs.measure.memory(model, x, beside).curve, expected)
    split = hs.check_split(model, x, beside)
    assert split
    assert split.at < 5  # no row is over before the cut
    with pytest.raises(BadInput, match="the cut is at 6, but with 5 steps it must be between 1 and 4"):
        hs.check_split(model, x, beside, at=6)


class Handed(nn.Module):
    """Insists on its state, in several forms."""

    def __init__(self, form):
        super().__init__()
        self.one, self.two = nn.LSTM(3, 8), nn.LSTM(8, 8)
        self.form = form

    def forward(self, x, state, cell=None):
        if self.form == "two arguments":
            out, state = self.one(x, (state, cell))
            return out
        if self.form == "a pair":
            return self.one(x, state)[0]
        out, _ = self.one(x, state[0])
        return self.two(out, state[1])[0]


def first_states(form):
    pair = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    return {"two arguments": pair, "a pair": (pair,), "one for each layer": ((pair, pair),)}[form]


@pytest.mark.parametrize("form", ["two arguments", "a pair", "one for each layer"])
def test_a_given_state_begins_the_first_piece_and_the_second_goes_on(form):
    x, states, model = torch.randn(9, 4, 3), first_states(form), Handed(form)
    with untouched(model):
        assert hs.check_split(model, x, *states)
        assert hs.check_split(model, call=lambda model: model(x, *states))


def test_a_state_of_another_form_is_refused():
    class Flat(Handed):
        def forward(self, x, state):
            h, c = state.chunk(2, -1)
            return self.one(x, (h.contiguous(), c.contiguous()))[0]

    with pytest.raises(
        BadInput, match=r"handed in as 'state' is not as those .*\(1, 4, 8\) and.*but \(1, 4, 16\).*None"
    ):
        hs.check_split(Flat("flat"), torch.randn(9, 4, 3), torch.zeros(1, 4, 16))


class Flat(nn.Module):
    """An agent: steps times environments on one axis, a state for each environment, and what draws an action."""

    def __init__(self, pair):
        super().__init__()
        self.rnn, self.actor, self.pair = (nn.LSTM if pair else nn.GRU)(3, 8), nn.Linear(8, 2), pair

    def act(self, x, state, done):
        rows = (state[0] if self.pair else state).shape[1]
        outs = []
        for step, over in zip(x.view(-1, rows, 3), done.view(-1, rows), strict=True):
            keep = (1 - over).view(1, -1, 1)
            out, state = self.rnn(step.unsqueeze(0), tuple(keep * s for s in state) if self.pair else keep * state)
            outs.append(out)
        logits = self.actor(torch.cat(outs).flatten(0, 1))
        return logits.argmax(-1), logits, state


class LanguageModel(nn.Module):
    """As tutorials have it: time first, a state in and out, and scores flattened for the loss."""

    def __init__(self, kind, *, flat):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.out, self.flat = nn.Embedding(11, 6), kind(6, 8, 2), nn.Linear(8, 11), flat

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.embed(tokens), hidden)
        scores = self.out(output)
        return (scores.view(-1, 11) if self.flat else scores), hidden


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("steps", "rows"), [(20, 4), (12, 6), (9, 4)])
def test_tokens_with_time_first_and_a_state_for_each_row_are_not_parted(steps, rows, kind):
    tokens, zeros = torch.randint(11, (steps, rows)), torch.zeros(2, rows, 8)
    state = (zeros, zeros) if kind is nn.LSTM else zeros
    plain, flat = LanguageModel(kind, flat=False), LanguageModel(kind, flat=True)
    found = hs.measure.memory(flat, tokens, state)
    assert (found.axes.time, found.axes.batch) == (0, 1)
    assert len(found.curve) == steps
    torch.testing.assert_close(found.curve, hs.measure.memory(plain, tokens, state).curve)
    split = hs.check_split(flat, tokens, state)
    assert split
    assert (split.axes.time, split.axes.sure) == (0, True)


@pytest.mark.parametrize("pair", [False, True])
def test_rows_and_steps_on_one_axis_are_parted_where_a_state_tells_the_rows(pair):
    x, done, zeros = torch.randn(9 * 4, 3), torch.zeros(9 * 4), torch.zeros(1, 4, 8)
    given, model = (zeros, zeros) if pair else zeros, Flat(pair)
    with untouched(model):
        split = hs.check_split(model, call=lambda model, state=given: model.act(x, state, done))
        if pair:  # known as a state whatever it is called
            assert hs.check_split(model, x, given, done, call=lambda m, x, ls, over: m.act(x, ls, over))
        found = hs.measure.memory(model, call=lambda model, state=given: model.act(x, state, done))
    assert split
    assert (split.axes.time, split.axes.batch) == (0, 1)
    steps = x.view(9, 4, 3)
    expected = hs.measure.memory(nn.Sequential(Steps(model)), steps, time_axis=0)
    torch.testing.assert_close(found.curve, expected.curve)


class Handing(nn.Module):
    """Tokens or observations, a state for each row, and a number that belongs to no row."""

    def __init__(self, embed, form):
        super().__init__()
        self.embed, self.rnn, self.form = embed, nn.GRU(3, 8), form

    def forward(self, x, state, scale):
        x = self.embed(x)
        return self.rnn(x.view(-1, state.shape[1], 3) if self.form == "flat" else x, state)[0] * scale


@pytest.mark.parametrize("form", ["flat", "time first"])
@pytest.mark.parametrize("rows", [3, 4])
def test_only_steps_times_rows_are_parted_whatever_else_the_call_is_given(form, rows):
    if form == "flat":  # 3 features: as many as one of the numbers of rows
        model, x = Handing(nn.Linear(3, 3), form), torch.randn(12 * rows, 3)
    else:  # as many steps as would be several times the rows
        model, x = Handing(nn.Embedding(7, 3), form), torch.randint(0, 7, (12, rows))
    split = hs.check_split(model, x, torch.zeros(1, rows, 8), torch.tensor(0.5))
    assert split
    assert (split.axes.time, split.axes.batch) == (0, 1)
    assert split.at < 12


def test_marks_in_front_are_not_the_sequence():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 8, batch_first=True)

        def forward(self, mask, x):
            return self.rnn(x * mask.unsqueeze(-1))[0]

    mask, x = torch.ones(4, 9, dtype=torch.long), torch.randn(4, 9, 3)
    given = given_call(hs.check_split, Masked(), (mask, x), kwargs={}, call=None, options={})
    assert given.x is x


class Steps(nn.Module):
    """The same agent on (time, batch, feature), from zeros."""

    def __init__(self, agent):
        super().__init__()
        self.rnn, self.actor = agent.rnn, agent.actor

    def forward(self, x):
        return self.actor(self.rnn(x)[0])


class Labeled(Tagger):
    def forward(self, x, lengths=None, labels=None, threshold=None, at=None):
        return super().forward(x)


@pytest.mark.parametrize(
    ("function", "option"),
    [
        (hs.measure.memory, {"lengths": torch.tensor([9, 8, 7, 6])}),
        (hs.measure.memory, {"threshold": 0.1}),
        (hs.report, {"labels": list("abcd")}),
        (hs.check_split, {"at": 3}),
        (hs.diagnose, {"lengths": torch.tensor([9, 8, 7, 6])}),
    ],
)
def test_an_option_that_the_model_takes_too_is_refused(function, option):
    (name,) = option
    said = rf"{name}= is an option of ours, and Labeled.forward takes a {name} as well.*call=lambda model: model\(x\)"
    with pytest.raises(BadInput, match=said):
        function(Labeled(), torch.randn(4, 9, 3), **option)
    x = torch.randn(4, 9, 3)
    assert hs.measure.memory(Labeled(), threshold=0.1, call=lambda model: model(x)).threshold == 0.1


@pytest.mark.parametrize("function", [hs.measure.memory, hs.check_split, hs.report, hs.measure.attention])
def test_a_call_that_cannot_be_read_is_refused(function):
    with pytest.raises(BadInput, match=rf"call= reads no tensor.*{function.__name__}\(model, x, call=lambda model, x:"):
        function(Tagger(), call=lambda model: model(torch.randn(4, 9, 3)))
    with pytest.raises(BadInput, match="call= says how the model is called, so mask= has nowhere to go"):
        function(Tagger(), torch.randn(4, 9, 3), call=lambda model, x: model(x), mask=1)


def test_options_are_given_by_name():
    with pytest.raises(
        BadInput, match=r"hs.check_split hands all.*GRU.forward takes 2 by position.*5 is one more.*: at,"
    ):
        hs.check_split(nn.GRU(3, 8), torch.randn(9, 4, 3), None, 5)
    with pytest.raises(BadInput, match=r"hs.measure.memory hands all.*0.1 is one more.*: lengths, threshold"):
        hs.measure.memory(nn.Linear(3, 8), torch.randn(9, 4, 3), 0.1)


def test_nothing_to_cut_is_said():
    with pytest.raises(BadInput, match="none of the 0 inputs of Tagger is a tensor"):
        hs.check_split(Tagger())


def test_memory_of_a_data_set_is_measured_by_a_function_of_the_batch():
    agent, batches = WithoutForward(), [{"obs": torch.randn(2, 9, 3)}, {"obs": torch.randn(3, 9, 3)}]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    found = hs.measure.memory(agent, loader, call=lambda model, batch: model.act(batch["obs"], None, 1.0))
    assert found.rows.shape == (5, 9)


def test_what_runs_along_time_is_cut_and_the_rest_is_not():
    x, mask, fixed = torch.randn(4, 9, 3), torch.ones(4, 9), torch.randn(4, 7)
    given = given_call(hs.report, Tagger(), (x, mask, fixed), kwargs={}, call=None, options={})
    axes = input_axes(Tagger(), x, time_axis=1)
    assert [tuple(each.shape) for each in given.piece(axes, slice(4, None))] == [(4, 5, 3), (4, 5), (4, 7)]
