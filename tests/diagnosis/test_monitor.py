"""The Monitor: looks now and then, tells once when something begins and when it ends, and changes nothing."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import unheard
from tests.support.training_loop import Model, batches, train


def test_watching_changes_no_weight_and_leaves_nothing_in_the_model():
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    data = batches(7)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, twin)]
    before = [sorted(vars(module)) for module in model.modules()]
    with hs.Monitor(model, optimizers[0], every=2):
        train(model, optimizers[0], data)
    train(twin, optimizers[1], data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nan_is_named_with_layer_row_and_step_even_between_two_looks(caplog):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    caplog.set_level(logging.WARNING, "hiddenstate")
    with hs.Monitor(model, optimizer, on_finding=told.append) as monitor:
        train(model, optimizer, batches(5, bad=2))
    (episode,) = monitor.findings
    assert told == [episode]
    assert (episode.finding.code, episode.finding.where, episode.began, episode.ended) == ("HS401", "lstm", 2, None)
    assert "step 3 of row 2" in episode.finding.evidence
    assert "HS401" in caplog.text
    assert "step 2, still so: HS401" in str(monitor)


def test_a_finding_is_told_once_and_ends():
    model = nn.RNN(3, 8, batch_first=True)
    told = []
    with hs.Monitor(model, every=1, on_finding=lambda e: told.append((e.finding.code, e.began, e.ended))) as monitor:
        for scale in (1, 1000, 1000, 1000, 1):
            model(scale * torch.randn(4, 6, 3))[0].sum().backward()
    assert told == [("HS402", 1, None), ("HS402", 1, 4)]
    (episode,) = monitor.findings
    assert str(episode) == "step 1, until step 4: HS402 saturated (model)"


def test_parameters_that_nothing_trains_are_named():
    model = Model()
    model.extra = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.lstm.parameters(), *model.cell.parameters(), *model.fc.parameters()], lr=0.1)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, batches(2))
    codes = {e.finding.code: e.finding.where for e in monitor.findings}
    assert codes == {"HS504": "extra.weight, extra.bias", "HS503": "extra.weight, extra.bias"}


def test_a_copy_of_a_watched_model_is_free(tmp_path):
    model = Model()
    with hs.Monitor(model, every=1) as monitor:
        twin = copy.deepcopy(model)
        twin(torch.randn(2, 5, 3))
        assert monitor.step == 0
        model(torch.randn(2, 5, 3))


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_an_interval_that_is_none_is_refused(every):
    with pytest.raises(hs.errors.BadInput, match=rf"every is {every}, but a whole number"):
        hs.Monitor(Model(), every=every)


class Step(nn.Module):
    """What a training framework wraps around a model: its own forward is never called."""

    def __init__(self):
        super().__init__()
        self.net, self.decoder = Model(), nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x: step(x),
        lambda step, x: step.net(x),
        lambda step, x: step.net.forward(x),
        lambda step, x: step.net.lstm(x)[0],
        lambda step, x: step.net.lstm.forward(hx=None, input=x)[0],
    ],
)
def test_a_call_of_any_module_that_holds_a_layer_counts(call):
    step = Step()
    with hs.Monitor(step, every=2) as monitor:
        for x in batches(5):
            call(step, x).square().mean().backward()
    assert monitor.step == 5
    assert monitor.history["step"].tolist() == [0, 2, 4]
    assert (monitor.history["net.lstm.gradient_first"] > 0).all()


def test_modules_called_one_after_the_other_are_one_training_call_until_one_comes_again():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        for x in batches(3):
            (step.net(x).mean() + step.decoder(x)[0].mean()).backward()
        assert monitor.step == 3
        step.decoder(batches(1)[0])
        assert monitor.step == 4, "it came again without the other"
        step.net(batches(1)[0])
        assert monitor.step == 4
        for count in (5, 6):
            step(batches(1)[0])
            assert monitor.step == count, "the model itself always begins a new one"
    assert (monitor.history["decoder.norm"][:4] > 0).all()
    assert (monitor.history["net.lstm.norm"] > 0).all()


def test_calls_in_eval_mode_and_calls_of_our_own_do_not_count():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        step.net.eval()
        step.net(batches(1)[0])
        with unheard():
            step(batches(1)[0])
        assert (monitor.step, str(monitor)) == (0, "0 training calls, 0 looks, 0 findings")
        step.decoder(batches(1)[0])
        assert monitor.step == 1
        step.net(batches(1)[0])
    assert "net.lstm.norm" not in monitor.history


def test_a_call_that_raises_is_over():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        with pytest.raises(RuntimeError, match="input"):
            step.net(torch.randn(4, 6, 5))
        step.net.eval()
        step.net(batches(1)[0])
    assert monitor.step == 1
    assert "net.lstm.norm" not in monitor.history


def test_copies_for_several_devices_are_refused_by_name():
    model = Model()
    with hs.Monitor(model):
        with pytest.raises(hs.errors.HiddenStateError, match=r"nn.DataParallel copies .* Monitor"):
            model._replicate_for_data_parallel()
        model(torch.randn(2, 5, 3))


def test_a_compiled_model_is_looked_at_and_so_is_one_that_is_compiled_in_part():
    step = Step()
    step.net = torch.compile(step.net, backend="eager")
    for model, call in ((step, step.net), (step.net, step.net)):
        with hs.Monitor(model, every=1) as monitor:
            for x in batches(2):
                call(x).square().mean().backward()
        assert monitor.step == 2
        assert any(name.endswith("lstm.gradient_first") for name in monitor.history)


def test_a_model_that_is_trained_and_never_seen_is_a_warning():
    model, other = Model(), Model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    monitor = hs.Monitor(model, optimizer)
    train(other, optimizer, batches(2))
    with pytest.warns(
        hs.errors.HiddenStateWarning, match=r"hs.Monitor\(Model\) saw 2 updates and not a single training"
    ):
        monitor.close()
    monitor.close()  # once


def test_a_copy_that_is_trained_in_its_place_is_a_warning_too():
    monitor = hs.Monitor(Model())
    with pytest.warns(hs.errors.HiddenStateWarning, match="saw not a single training call.*a copy of it"):
        monitor.close()


def test_an_exception_before_the_first_call_is_not_hidden_by_a_warning(recwarn):
    with pytest.raises(KeyError), hs.Monitor(Model()):
        raise KeyError("data")
    assert len(recwarn) == 0


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.actor = nn.LSTM(3, 8), nn.Linear(8, 2)

    def act(self, x):
        return self.actor(self.lstm(x)[0])


def test_whatever_the_training_step_calls_is_heard():
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
    with hs.Monitor(agent, optimizer, every=2) as monitor:
        for _ in range(4):
            agent.act(torch.randn(5, 2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.history["step"].tolist() == [0, 2]
    assert "lstm.norm" in monitor.history


def test_a_layer_that_is_called_in_a_way_of_its_own_is_let_through():
    class Odd(nn.GRU):
        def forward(self, *, sequence):
            return super().forward(sequence)

    model = nn.ModuleDict({"rnn": Odd(3, 8)})
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(3):
            model["rnn"](sequence=torch.randn(9, 4, 3))[0].sum().backward()
    assert monitor.step == 3


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_made_within_a_closure_are_looked_at_behind_it(kind, keyword):
    torch.manual_seed(0)
    model, unused = nn.GRU(3, 4, batch_first=True), nn.Linear(2, 2)
    whole = nn.ModuleDict({"gru": model, "unused": unused})
    optimizer = kind(whole.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(2, 5, 3))[0].square().mean()
        loss.backward()
        return loss

    with hs.Monitor(whole, optimizer, every=1) as monitor:
        for _ in range(3):
            returned = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert torch.is_tensor(returned)
            optimizer.zero_grad()
    assert "HS503 parameters without gradient (unused.weight, unused.bias)" in str(monitor)
    assert "gru" not in str(monitor)


class OutputAlone(nn.LSTM):
    def forward(self, x, hx=None):
        return super().forward(x, hx)[0]


@pytest.mark.parametrize(
    ("kind", "run"),
    [(nn.LSTM, lambda rnn, x: nn.LSTM.forward(rnn, x)[0]), (OutputAlone, lambda rnn, x: rnn(x))],
    ids=["run past it", "another result"],
)
@pytest.mark.parametrize("more", [True, False])
def test_layers_of_which_nothing_was_seen_are_named(kind, run, more):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, batch_first=True)
            self.heard = nn.GRU(4, 4, batch_first=True) if more else None

        def forward(self, x):
            out = run(self.rnn, x)
            return out if self.heard is None else self.heard(out)[0]

    net = Net()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor = hs.Monitor(net, every=1)
        for _ in range(2):
            net(torch.randn(3, 7, 3)).sum().backward()
        monitor.flush()
        monitor.close()
        monitor.close()  # once is enough
    assert "nothing of rnn: not called in the calls that were looked at, or run past the layer itself" in str(monitor)
    said = [str(warning.message) for warning in told]
    past = [text for text in said if "does not look at: the model: a fused recurrent kernel (lstm) runs here" in text]
    silent = [text for text in said if "saw nothing of rnn: not called in the calls" in text]
    assert len(past) == (kind is nn.LSTM)  # the kernel that nobody heard was seen to run
    assert len(silent) == (not more)
