"""Recording changes nothing: not the model, not its hooks, not its random stream, also after an exception."""

import copy
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs


class Tagger(nn.Module):
    """Two fused layers, one of them called twice, and a cell in a loop."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.encoder = nn.ModuleDict({"lstm": nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.3)})
        self.shared = nn.GRU(10, 6)
        self.cell = nn.LSTMCell(6, 7)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, fail=False):
        out, _ = self.encoder["lstm"](self.embed(x))
        out, h = self.shared(self.drop(out))
        state = (out.new_zeros(x.shape[1], 7),) * 2
        for step in out:
            state = self.cell(step, state)
        if fail:
            raise RuntimeError("on purpose")
        return state[0], self.shared(torch.cat([out, out[..., :4]], -1), h)[0]


TRACKS = [
    "encoder.lstm.l0",
    "encoder.lstm.l0_reverse",
    "encoder.lstm.l1",
    "encoder.lstm.l1_reverse",
    "shared.l0",
    "cell",
]


def hooks(model):
    found = {(path, n): v for path, m in model.named_modules() for n, v in vars(m).items() if "hook" in n}
    return {where: list(value) if isinstance(value, dict) else value for where, value in found.items()}


def attributes(model):
    return {path: sorted(vars(module)) for path, module in model.named_modules()}


def train(model, x, watch=None, **options):
    torch.manual_seed(3)
    model.zero_grad()
    with torch.enable_grad() if watch is None else watch:
        loss = sum(out.square().sum() for out in model(x, **options))
        loss.backward()
    return [loss.detach(), torch.random.get_rng_state(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"gates": True}, {"gates": True, "grads": True}, {"every": 3}], ids=str)
def test_training_goes_on_as_if_nobody_watched(options):
    model, x = Tagger(), torch.randn(6, 2, 3)
    plain = train(model, x)
    for _ in range(2):
        rec = hs.record(model, **options)
        assert all(torch.equal(a, b) for a, b in zip(train(model, x, rec), plain, strict=True))
        assert list(rec) == TRACKS
        assert [len(rec.runs(track)) for track in rec] == [1, 1, 1, 1, 1, 1]


@given(
    layers=st.integers(1, 3),
    both=st.booleans(),
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    gates=st.booleans(),
    grad=st.booleans(),
    threads=st.integers(1, 2),
)
def test_outputs_are_those_of_the_plain_run_to_the_bit_at_any_size(layers, both, kind, sizes, gates, grad, threads):
    batch, time, feature, hidden = sizes
    layer, x = kind(feature, hidden, layers, bidirectional=both), torch.randn(time, batch, feature)
    torch.set_num_threads(threads)
    try:
        with torch.set_grad_enabled(grad):
            plain, _ = layer(x)
            with hs.record(layer, gates) as rec:
                assert torch.equal(layer(x)[0], plain)
    finally:
        torch.set_num_threads(1)
    top = [rec[track].h for track in rec][-(2 if both else 1) :]
    assert torch.equal(torch.cat(top, -1).transpose(0, 1), plain)


def test_no_hook_and_no_attribute_is_left_behind():
    model, x = Tagger(), torch.randn(6, 2, 3)
    model.shared.register_forward_hook(lambda *_: None)
    before = hooks(model), attributes(model)
    with hs.record(model, gates=True):
        assert attributes(model) != before[1]
        model(x)
    assert (hooks(model), attributes(model)) == before
    with pytest.raises(RuntimeError, match="on purpose"), hs.record(model, gates=True) as rec:
        model(x, fail=True)
    assert (hooks(model), attributes(model)) == before
    assert list(rec) == TRACKS  # what had been run until then


def test_an_exception_inside_a_layer_leaves_no_trace():
    model, x = Tagger(), torch.randn(6, 2, 3)
    plain = train(model, x)
    with hs.record(model, gates=True) as rec:
        with pytest.raises(RuntimeError, match=r"input.size"):
            model.encoder["lstm"](torch.randn(6, 2, 99))
        with pytest.raises(RuntimeError):
            model.cell(torch.randn(2, 99))
        assert all(torch.equal(a, b) for a, b in zip(train(model, x), plain, strict=True))
    assert [len(rec.runs(track)) for track in rec] == [1, 1, 1, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(train(model, x), plain, strict=True))


def test_a_keyboard_interrupt_inside_a_layer_leaves_no_trace():
    layer, x = nn.LSTM(3, 4), torch.randn(6, 2, 3)

    class Interrupting(nn.LSTM):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    odd = Interrupting(3, 4)
    with pytest.raises(KeyboardInterrupt), hs.record(odd, gates=True):
        odd(x)
    assert torch.overrides._get_current_function_mode_stack() == []
    with hs.record(layer) as rec:
        layer(x)
    assert list(rec) == ["l0"]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_stays(training):
    model = Tagger().train(training)
    with hs.record(model):
        model(torch.randn(6, 2, 3))
        assert all(module.training == training for module in model.modules())


def test_users_hooks_see_the_same_calls_and_may_change_them():
    layer, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    state = torch.randn(1, 2, 4)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, state))
    layer.register_forward_hook(lambda module, args, out: (out[0] + 1, out[1]))
    plain = layer(x)
    with hs.record(layer, gates=True) as rec:
        again = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(rec["l0"].initial["h"], state[0])
    torch.testing.assert_close(rec["l0"].h.transpose(0, 1) + 1, again[0])


def test_a_carried_state_is_recorded_as_the_initial_one():
    layer = nn.LSTM(3, 4, batch_first=True)
    carry = hs.Carry(layer)
    layer(torch.randn(2, 5, 3))
    before = carry.state
    with hs.record(layer) as rec:
        layer(torch.randn(2, 5, 3))
    assert torch.equal(rec["l0"].initial["h"], before["h"][0])
    assert torch.equal(rec["l0"].initial["c"], before["c"][0])


def test_recordings_may_be_nested():
    model, x = Tagger(), torch.randn(6, 2, 3)
    plain = train(model, x)
    with hs.record(model, gates=True) as outer, hs.record(model.encoder, tracks="lstm.l1") as inner:
        assert all(torch.equal(a, b) for a, b in zip(train(model, x), plain, strict=True))
    assert list(outer) == TRACKS
    assert list(inner) == ["lstm.l1"]
    assert torch.equal(inner["lstm.l1"].h, outer["encoder.lstm.l1"].h)
    assert inner["lstm.l1"].gates == {}
    assert len(outer["encoder.lstm.l1"].gates) == 4


def test_a_recording_is_not_entered_twice_at_once_but_may_go_on_later():
    layer, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    rec = hs.record(layer)
    with rec:
        layer(x)
        with pytest.raises(hs.errors.BadInput, match="under way already"), rec:
            pass
    layer(x)
    with rec:
        layer(x)
    assert len(rec.runs("l0")) == 2


def test_threads_with_recordings_of_their_own_do_not_mix():
    layer = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    inputs = [torch.randn(2, 5 + n, 3) for n in range(8)]
    plain = [layer(x)[0] for x in inputs]
    ready = threading.Barrier(4)

    def work(n):
        ready.wait()
        with hs.record(layer, gates=True) as rec:
            out, _ = layer(inputs[n])
        return rec, out

    with ThreadPoolExecutor(4) as pool:
        for (rec, out), expected in zip(pool.map(work, range(8)), plain, strict=True):
            assert torch.equal(out, expected)
            assert torch.equal(rec["l1"].h, expected)


def test_threads_started_in_the_block_are_heard_and_others_are_not():
    layer, go, done = nn.GRU(3, 4), threading.Event(), threading.Event()

    def older():
        go.wait()
        layer(torch.randn(6, 2, 3))
        done.set()

    bystander = threading.Thread(target=older)
    bystander.start()
    with hs.record(layer) as rec:
        go.set()
        done.wait()
        for _ in range(2):
            worker = threading.Thread(target=layer, args=(torch.randn(5, 2, 3),))
            worker.start()
            worker.join()
    bystander.join()
    assert [run.h.shape[1] for run in rec.runs("l0")] == [5, 5]


def test_a_copy_or_pickle_of_a_model_under_recording_is_not_recorded():
    layer, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    with hs.record(layer) as rec:
        copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        assert torch.equal(copied(x)[0], layer(x)[0])
        assert torch.equal(pickled(x)[0], layer(x)[0])
    assert len(rec.runs("l0")) == 2


def test_a_recording_keeps_no_graph_alive():
    layer, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    with hs.record(layer, gates=True) as rec:
        out, _ = layer(x)
    assert not any(
        value.requires_grad for value in (rec["l0"].h, *rec["l0"].gates.values(), *rec["l0"].initial.values())
    )
    graph = out.grad_fn
    del out
    gc.collect()
    assert len(gc.get_referrers(graph)) <= 1


@pytest.mark.parametrize(
    ("tracks", "kept"),
    [
        ("cell", ["cell"]),
        ("shared", ["shared.l0"]),
        (["encoder.lstm.l1", "cell"], ["encoder.lstm.l1", "cell"]),
        (("encoder.lstm",), TRACKS[:4]),
        (lambda name: name.endswith("_reverse"), ["encoder.lstm.l0_reverse", "encoder.lstm.l1_reverse"]),
    ],
    ids=["cell", "layer", "list", "tuple", "function"],
)
def test_tracks_choose_by_name_list_or_function(tracks, kept):
    model, x = Tagger().eval(), torch.randn(6, 2, 3)
    plain = model(x)
    with hs.record(model, gates=True, tracks=tracks) as rec:
        assert all(torch.equal(a, b) for a, b in zip(model(x), plain, strict=True))
    assert list(rec) == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_kept_in_the_dtype_asked_for(dtype):
    model, x = Tagger(), torch.randn(6, 2, 3)
    with hs.record(model, gates=True, dtype=dtype) as rec:
        model(x)
    for track in rec:
        for run in rec.runs(track):
            values = [*run.states.values(), *run.gates.values(), *run.initial.values()]
            assert {value.dtype for value in values} == {dtype}


@given(every=st.integers(1, 8))
def test_every_keeps_steps_by_their_number(every):
    layer, x = nn.LSTM(3, 4, bidirectional=True), torch.randn(7, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 7]), enforce_sorted=False)
    with hs.record(layer, gates=True) as whole, hs.record(layer, gates=True, every=every) as thin:
        layer(packed)
    for track in whole:
        assert torch.equal(thin[track].h, whole[track].h[:, ::every])
        assert torch.equal(thin[track].c, whole[track].c[:, ::every])
        assert torch.equal(thin[track].gates["output"], whole[track].gates["output"][:, ::every])
        assert torch.equal(thin[track].valid, whole[track].valid[:, ::every])
        assert torch.equal(thin[track].initial["c"], whole[track].initial["c"])


def test_an_unknown_track_is_refused_with_those_there_are():
    model, x = Tagger(), torch.randn(6, 2, 3)
    message = r"named 'encoder.gru'. The tracks are: encoder.lstm.l0, .*, cell"
    with pytest.raises(hs.errors.UnknownTrack, match=message), hs.record(model, tracks="encoder.gru"):
        model(x)  # what recurs in a model with code of its own shows when it is called
    with pytest.raises(KeyError), hs.record(model, tracks=["cell", "nope"]):
        model(x)
    with pytest.raises(hs.errors.UnknownTrack, match="named 'l7'"):
        hs.record(nn.GRU(3, 4), tracks="l7")


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(hs.errors.BadInput, match=r"chooses nothing. The tracks are: l0"):
        hs.record(nn.GRU(3, 4), tracks=lambda name: False)


def test_a_model_without_recurrent_layers_is_refused_with_a_way_out():
    with pytest.raises(hs.errors.NotRecurrent, match=r"Linear has no recurrent layer.*initial_state.*hs.register"):
        hs.record(nn.Linear(3, 4))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_step_that_is_no_step_is_refused(every):
    with pytest.raises(hs.errors.BadInput, match=r"every is .*whole number from 1"):
        hs.record(nn.GRU(3, 4), every=every)


def test_a_subclass_that_only_wraps_the_kernel_is_recorded_too():
    class Scaled(nn.LSTM):
        def forward(self, x, hx=None):
            out, state = super().forward(x * 2, hx)
            return out + 1, state

    layer, x = Scaled(3, 4, num_layers=2), torch.randn(6, 2, 3)
    plain = layer(x)[0]
    with hs.record(layer, gates=True) as rec:
        assert torch.equal(layer(x)[0], plain)
    torch.testing.assert_close(rec["l1"].h.transpose(0, 1) + 1, plain.detach())


class Loop(nn.GRU):
    """A subclass that leaves torch's kernel and steps by itself."""

    def forward(self, x, hx=None):
        h = torch.zeros(x.shape[1], self.hidden_size) if hx is None else hx[0]
        outs = []
        for step in x:
            h = torch.tanh(step @ self.weight_ih_l0[: self.hidden_size].T + h)
            outs.append(h)
        return torch.stack(outs), h.unsqueeze(0)


def test_of_a_layer_without_torchs_kernel_the_outputs_are_known():
    layer, x, state = Loop(3, 4), torch.randn(6, 2, 3), torch.randn(1, 2, 4)
    with hs.record(layer, gates=True, grads=True) as rec:
        out, _ = layer(x, state)
        out.sum().backward()
    run = rec["l0"]
    assert torch.equal(run.h.transpose(0, 1), out.detach())
    assert torch.equal(run.initial["h"], state[0])
    assert run.gates == run.grads == {}


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_not_kept_is_let_go(grad):
    layer, x = nn.LSTM(3, 4), torch.randn(100, 2, 3)
    with torch.set_grad_enabled(grad), hs.record(layer, gates=True, every=50) as rec:
        layer(x)
    (take,) = rec._runs["l0"]
    assert take.source is None
    assert all(value.untyped_storage().nbytes() < 1_000 for value in take.values().values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grads", [False, True])
def test_a_compiled_model_is_recorded_like_any_other_whether_or_not_it_ran_before(grads, backend):
    torch._dynamo.reset()
    model, x = Tagger().eval(), torch.randn(5, 2, 3)
    with hs.record(model, gates=True, grads=grads) as plain:
        model(x)[0].sum().backward()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        before = hooks(model), attributes(model)
        with hs.record(compiled, gates=True, grads=grads) as rec:
            compiled(x)[0].sum().backward()
        assert (hooks(model), attributes(model)) == before
        compiled(x)
        assert list(rec) == TRACKS
        for track in TRACKS:
            for one, other in zip(rec.runs(track), plain.runs(track), strict=True):
                torch.testing.assert_close((one.h, one.gates, one.grads), (other.h, other.gates, other.grads))
