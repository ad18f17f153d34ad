"""How a model is called: by position, by name, by a function; and what its arguments are called."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import calling
from hiddenstate.diagnosis.argument_names import is_state, state_named
from hiddenstate.errors import BadInput
from tests.support.untouched import untouched


class Named(nn.Module):
    """Takes its inputs by name alone, as models of transformers do; `sick` mixes rows."""

    def __init__(self, sick=False):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 2)
        self.sick = sick

    def forward(self, *, input_ids=None, features=None, attention_mask=None, **unused):
        x = self.embed(input_ids) + features
        out, _ = self.rnn(x if attention_mask is None else x * attention_mask.unsqueeze(-1))
        return {"logits": self.head(out - out.mean(0) if self.sick else out)}


def batch():
    return {
        "input_ids": torch.randint(12, (4, 9)),
        "features": torch.randn(4, 9, 6),
        "attention_mask": torch.ones(4, 9, dtype=torch.long),
    }


def test_inputs_by_name_are_varied_like_those_by_position():
    assert hs.diagnose(Named(), **batch()).ok
    assert hs.diagnose(Named(sick=True), **batch()).codes == ("HS101",)


class OfADict(nn.Module):
    def __init__(self, sick=False):
        super().__init__()
        self.inner = Named(sick)

    def forward(self, given):
        return self.inner(**given)["logits"]


def test_a_dict_of_inputs_is_varied_as_well():
    assert hs.diagnose(OfADict(), batch()).ok
    assert hs.diagnose(OfADict(sick=True), batch()).codes == ("HS101",)


class Agent(nn.Module):
    """Has no forward."""

    def __init__(self, sick=False):
        super().__init__()
        self.lstm, self.actor, self.critic = nn.LSTM(3, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.sick = sick

    def states(self, x, state, done):
        outs = []
        for step, over in zip(x, done, strict=True):
            keep = (1 - over).view(1, -1, 1)
            state = tuple(keep * part for part in state) if not self.sick else tuple(0 * part for part in state)
            out, state = self.lstm(step.unsqueeze(0), state)
            outs.append(out)
        return torch.cat(outs), state

    def act(self, x, state, done):
        hidden, state = self.states(x, state, done)
        return self.actor(hidden), self.critic(hidden), state


STATE = torch.zeros(1, 5, 8), torch.zeros(1, 5, 8)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("sick", [False, True])
def test_a_model_without_a_forward_is_called_by_a_function(sick, explicit):
    x, state, done = torch.randn(7, 5, 3), STATE, torch.zeros(7, 5)
    model = Agent(sick)
    with untouched(model):
        if explicit:
            report = hs.diagnose(model, x, state, done, call=lambda m, x, s, d: m.act(x, s, d), batch_axis=1)
        else:
            report = hs.diagnose(model, call=lambda model: model.act(x, state, done), batch_axis=1)
    assert report.codes == (("HS103",) if sick else ()), report.text()


def test_a_module_that_the_function_reads_is_no_part_of_the_model():
    x, done, before = torch.randn(7, 5, 3, requires_grad=True), torch.zeros(7, 5), nn.Linear(3, 3)
    report = hs.diagnose(Agent(), call=lambda model: model.act(before(x), STATE, done), batch_axis=1)
    assert "HS205" not in report.codes


def test_variables_of_the_module_and_defaults_are_inputs_too():
    x, done = torch.randn(7, 5, 3), torch.zeros(7, 5)
    assert hs.diagnose(Agent(), call=lambda model, x=x, done=done: model.act(x, STATE, done), batch_axis=1).ok


def test_the_function_is_not_changed_by_what_it_is_given_in_a_trial():
    x, done = torch.randn(7, 5, 3), torch.zeros(7, 5)
    kept = x.clone()
    call = lambda model: model.act(x, STATE, done)  # noqa: E731
    hs.diagnose(Agent(), call=call, batch_axis=1)
    assert torch.equal(x, kept)
    assert torch.equal(call(Agent())[0], call(Agent())[0]) or x is not None


def test_a_function_that_reads_no_tensor_is_refused_with_both_ways():
    with pytest.raises(BadInput, match=r"call= reads no tensor.*call=lambda model, x: model.act\(x\)"):
        hs.diagnose(Agent(), call=lambda model: model.act(torch.randn(7, 5, 3), None, None))
    with pytest.raises(BadInput, match="call= says how the model is called, so mask= has nowhere to go"):
        hs.diagnose(Agent(), call=lambda model: model.act(STATE, None, None), mask=torch.ones(3))


def test_an_option_of_ours_that_the_model_takes_too_is_refused():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 8, batch_first=True)

        def forward(self, x, lengths=None):
            return self.rnn(x)[0]

    x, told = torch.randn(4, 9, 3), torch.tensor([9, 5, 4, 2])
    with pytest.raises(BadInput, match=r"lengths= is an option of ours, and Ragged.forward takes a lengths as well"):
        hs.diagnose(Ragged(), x, lengths=told)
    assert hs.diagnose(Ragged(), x, told, lengths=told).ok
    assert hs.diagnose(Ragged(), lengths=told, call=lambda model: model(x)).ok


@pytest.mark.parametrize(
    "name", ["h", "hx", "hidden", "prev_hidden", "h_prev", "state", "rnn_hxs", "lstm_state", "prev", "h_0", "memory"]
)
def test_a_state_is_called_like_one(name):
    assert state_named(name)
    assert is_state(name, torch.zeros(1, 4, 8))
    assert not is_state(name, torch.zeros(4, 8, dtype=torch.long))  # tokens
    assert not is_state(name, torch.zeros(4))  # one number for each row


@pytest.mark.parametrize(
    "name", ["prev_action", "prev_output_tokens", "past_values", "previous_reward", "x", "", "chars"]
)
def test_what_only_was_before_is_no_state(name):
    assert not state_named(name)


def test_arguments_are_parted_as_they_were_given():
    how = calling(Named(), (), {"a": 1, "b": 2})
    assert how.parted((3, 4)) == ((), {"a": 3, "b": 4})
    how = calling(OfADict(), (1,), {"b": 2})
    assert how.names == ("given", "b")
    assert how.parted((3, 4)) == ((3,), {"b": 4})
