"""grads=True: the gradient of the loss with respect to every state, as autograd over an explicit loop gives it."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from tests.support.recorded import KINDS, step

ignore_onednn = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def explicit(layer, x, lengths):
    """Run every row and step by hand in the graph; outputs, final states, and each state by track, row and step."""
    seen, batch = {}, x.shape[0]
    ends = ("", "_reverse") if layer.bidirectional else ("",)
    finals = []
    for depth in range(layer.num_layers):
        outs = []
        for end in ends:
            w = {
                n.removesuffix(f"_l{depth}{end}"): p
                for n, p in layer.named_parameters()
                if n.endswith(f"_l{depth}{end}")
            }
            rows, last = [], []
            for row in range(batch):
                h, cell = x.new_zeros(layer.proj_size or layer.hidden_size), [x.new_zeros(layer.hidden_size)]
                cell = cell if layer.mode == "LSTM" else []
                out = [None] * x.shape[1]
                steps = range(lengths[row])
                for t in reversed(steps) if end else steps:
                    from_x = w["weight_ih"] @ x[row, t] + w.get("bias_ih", 0)
                    from_h = w["weight_hh"] @ h + w.get("bias_hh", 0)
                    h, cell, _ = step(layer.mode, from_x, from_h, h, cell)
                    h = w["weight_hr"] @ h if layer.proj_size else h
                    for part in (h, *cell):
                        part.retain_grad()
                    seen[f"l{depth}{end}", row, t] = (h, *cell)
                    out[t] = h
                rows.append(torch.stack([o if o is not None else torch.zeros_like(h) for o in out]))
                last.append((h, *cell))
            outs.append(torch.stack(rows))
            finals.append([torch.stack(parts) for parts in zip(*last, strict=True)])
        x = torch.cat(outs, -1)
    return x, [torch.stack(parts) for parts in zip(*finals, strict=True)], seen


def loss(out, finals):
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    return (out * weight).sum() + sum((final**2 * (n + 1)).sum() for n, final in enumerate(finals))


@ignore_onednn
@pytest.mark.parametrize("lengths", [[5, 5, 5], [2, 5, 3]], ids=["even", "packed"])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_is_that_of_an_explicit_loop(kind, both, lengths):
    for dtype in (torch.float64, torch.float32):
        layer = KINDS[kind](4, 5, num_layers=2, bidirectional=both, batch_first=True, dtype=dtype)
        x = torch.randn(3, 5, 4, dtype=dtype)
        out, finals, seen = explicit(layer, x, lengths)
        loss(out, finals).backward()
        packed = lengths != [5, 5, 5]
        with hs.record(layer, grads=True) as rec:
            fed = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False) if packed else x
            result, native = layer(fed)
            result = pad_packed_sequence(result, batch_first=True)[0] if packed else result
            loss(result, native if layer.mode == "LSTM" else [native]).backward()
        tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        for (track, row, t), parts in seen.items():
            for name, part in zip("hc", parts, strict=False):
                torch.testing.assert_close(rec[track].grads[name][row, t], part.grad, **tolerance)
        for track in rec:
            assert not rec[track].gates
            for grad in rec[track].grads.values():
                assert not grad[~rec[track].valid].any()


def test_gradients_may_come_after_the_block_and_after_the_weights_have_changed():
    layer, x = nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4)
    with hs.record(layer, grads=True) as rec:
        out, _ = layer(x)
    assert rec["l0"].grads == {}
    out.square().sum().backward()
    first = rec["l0"].grads["h"]
    with hs.record(layer, grads=True) as again:
        out, _ = layer(x)
    out.square().sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    torch.testing.assert_close(again["l0"].grads["h"], first)


def test_gradients_of_several_backward_passes_add_up():
    layer, x = nn.GRU(4, 5, batch_first=True), torch.randn(3, 6, 4)
    with hs.record(layer, grads=True) as rec:
        out, _ = layer(x)
        out.sum().backward(retain_graph=True)
        once = rec["l0"].grads["h"]
        out.sum().backward()
    torch.testing.assert_close(rec["l0"].grads["h"], 2 * once)


def test_a_run_without_a_graph_has_no_gradients():
    layer = nn.GRU(4, 5)
    with torch.no_grad(), hs.record(layer, grads=True) as rec:
        layer(torch.randn(6, 3, 4))
    assert rec["l0"].grads == {}


def test_a_cells_gradients_are_those_of_its_own_tensors():
    cell, x = nn.LSTMCell(4, 5), torch.randn(3, 6, 4)
    state, kept = (torch.zeros(3, 5), torch.zeros(3, 5)), []
    with hs.record(cell, grads=True) as rec:
        for t in range(6):
            state = cell(x[:, t], state)
            for part in state:
                part.retain_grad()
            kept.append(state)
        sum((h * t).sum() for t, (h, _) in enumerate(kept)).backward()
    for name, place in (("h", 0), ("c", 1)):
        assert torch.equal(rec["l0"].grads[name], torch.stack([s[place].grad for s in kept], 1))


def test_every_keeps_the_gradients_of_its_own_steps():
    layer, x = nn.GRU(4, 5, batch_first=True), torch.randn(3, 7, 4)
    found = {}
    for every in (1, 3):
        with hs.record(layer, grads=True, every=every) as rec:
            layer(x)[0].square().sum().backward()
        found[every] = rec["l0"].grads["h"]
    assert torch.equal(found[3], found[1][:, ::3])
