import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, MissingExtra, NotRecurrent
from hiddenstate.recording import Trajectory
from tests.support.untouched import untouched


class Reader(nn.Module):
    """Tokens through two layers."""

    def __init__(self, bidirectional=False, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(30, 4)
        self.low = nn.LSTM(4, 5, batch_first=batch_first)
        self.drop = nn.Dropout(0.5)
        self.high = nn.GRU(5, 6, batch_first=batch_first, bidirectional=bidirectional)

    def forward(self, tokens):
        return self.high(self.drop(self.low(self.embed(tokens))[0]))[0]


def letters(text):
    return [ord(letter) - ord("a") for letter in text]


TEXTS = ["abc", "abcd", "zyxwvut", "a"]


# --- of states ---


def test_pca_is_the_best_flat_map():
    states = torch.randn(20, 3, 6, dtype=torch.float64)
    found = hs.measure.compare(states, components=3)
    final = states[:, -1] - states[:, -1].mean(0)
    sizes = torch.linalg.svdvals(final) ** 2
    torch.testing.assert_close(found.explained, (sizes / sizes.sum())[:3])
    torch.testing.assert_close(found.coordinates.square().sum(0), sizes[:3])
    torch.testing.assert_close(found.coordinates.T @ found.coordinates, torch.diag(sizes[:3]), rtol=1e-9, atol=1e-9)


def test_all_components_keep_all_distances():
    found = hs.measure.compare(torch.randn(8, 3, 4, dtype=torch.float64), components=4)
    torch.testing.assert_close(torch.cdist(found.coordinates, found.coordinates), found.distances)
    assert float(found.explained.sum()) == pytest.approx(1)


def test_distances_are_a_metric_and_neighbors_follow_them():
    found = hs.measure.compare(torch.randn(7, 2, 3))
    assert torch.equal(found.distances, found.distances.T)
    assert not found.distances.diagonal().any()
    assert found.neighbors.shape == (7, 6)
    for row in range(7):
        assert row not in found.neighbors[row]
        assert (found.distances[row, found.neighbors[row]].diff() >= 0).all()


def test_each_row_ends_at_its_own_last_step():
    states = torch.arange(24.0).reshape(2, 4, 3)
    lengths = torch.tensor([2, 4])
    found = hs.measure.compare(Trajectory(states, lengths))
    assert torch.equal(found.states, torch.stack([states[0, 1], states[1, 3]]))
    states[0, 2:] = float("nan")
    assert torch.equal(hs.measure.compare(states, lengths=lengths).states, found.states)
    assert torch.equal(hs.measure.compare(states, lengths=lengths, pool="mean").states[0], states[0, :2].mean(0))
    assert torch.equal(hs.measure.compare(-states, lengths=lengths, pool="max").states[0], -states[0, 0])


def test_labels_are_compared_with_neighbors():
    states = torch.tensor([0.0, 0.1, 5.0, 5.1, 5.2]).reshape(5, 1, 1)
    found = hs.measure.compare(states, ["a", "a", "b", "b", "a"], components=1)
    assert found.labels == ("a", "a", "b", "b", "a")
    assert found.agreement == 0.8
    assert "80.0% lie next to their own label" in str(found)
    assert "closest are" in str(found)
    assert hs.measure.compare(states, torch.arange(5)).labels == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("labels", [["a", "b", "c"], [1, 2, 3], torch.arange(3)])
def test_labels_that_no_two_rows_share_say_nothing_of_neighbors(labels):
    found = hs.measure.compare(torch.randn(3, 2, 4), labels)
    assert found.agreement is None
    assert "label" not in str(found)


def test_final_states_are_taken_as_they_are():
    layer = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    _, (h_n, _) = layer(torch.randn(5, 6, 3))
    expected = h_n[-1].detach()
    for states in (h_n[-1], h_n[-1].unsqueeze(1), list(h_n[-1].detach()), h_n[-1].detach().numpy()):
        torch.testing.assert_close(hs.measure.compare(states).states, expected)


def test_stacked_layers_beside_labels_are_refused_with_the_way_out():
    with pytest.raises(BadInput, match=r"5 labels, but this tensor \(2, 5, 4\) has 2 rows of 5 steps.*h_n\[-1\]"):
        hs.measure.compare(torch.randn(2, 5, 4), labels=list("abcde"))


def test_a_list_of_anything_else_is_refused():
    with pytest.raises(BadInput, match=r"one final state \(unit,\) for each sequence, but these are \(2, 3\)"):
        hs.measure.compare([torch.randn(2, 3), torch.randn(4, 3)])


def test_a_reverse_track_ends_at_its_first_position():
    layer, x = nn.GRU(3, 4, batch_first=True, bidirectional=True), torch.randn(2, 5, 3)
    with hs.record(layer) as recording:
        _, final = layer(x)
    for track, expected in zip(("l0", "l0_reverse"), final.detach(), strict=True):
        torch.testing.assert_close(hs.measure.compare(recording[track]).states, expected)


def test_another_part_may_be_compared():
    h, c = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    assert torch.equal(hs.measure.compare(Trajectory(h, c=c), part="c").states, c[:, -1])


def test_one_sequence_is_a_map_of_one_point():
    found = hs.measure.compare(torch.randn(1, 2, 3))
    assert found.coordinates.tolist() == [[0, 0]]
    assert found.neighbors.shape == (1, 0)
    assert str(found).startswith("1 states (of each row of (1, 2, 3), the last of 2 steps")


def test_identical_states_explain_nothing():
    found = hs.measure.compare(torch.ones(3, 2, 4))
    assert found.explained.tolist() == [0, 0]


# --- of a model ---


@pytest.mark.parametrize("batch_first", [True, False])
def test_texts_of_unequal_length_are_run_one_by_one(batch_first):
    model = Reader(batch_first=batch_first).train()
    with untouched(model):
        found = hs.measure.compare(
            model=model, inputs=TEXTS, tokenize=letters, labels=TEXTS, time_axis=1 if batch_first else 0
        )
    model.eval()
    for row, text in enumerate(TEXTS):
        tokens = torch.tensor(letters(text)).unsqueeze(0 if batch_first else 1)
        output = model(tokens)
        torch.testing.assert_close(found.states[row], (output[0, -1] if batch_first else output[-1, 0]))
    assert found.coordinates.shape == (4, 2)
    assert found.labels == tuple(TEXTS)


def test_both_directions_end_where_they_end():
    model = Reader(bidirectional=True).eval()
    found = hs.measure.compare(model=model, inputs=[torch.tensor(letters(text)) for text in TEXTS])
    output = model(torch.tensor([letters("zyxwvut")]))[0]
    torch.testing.assert_close(found.states[2], torch.cat([output[-1, :6], output[0, 6:]]))


def test_a_track_may_be_named():
    model = Reader().eval()
    found = hs.measure.compare(model=model, inputs=[torch.tensor([1, 2, 3])] * 2, track="low.l0", part="c", pool="mean")
    assert found.states.shape == (2, 5)
    assert float(found.distances.max()) == 0


def test_real_inputs_work_too():
    layer = nn.GRU(3, 4, batch_first=True)
    found = hs.measure.compare(model=layer, inputs=[torch.randn(2, 3), torch.randn(5, 3)])
    assert found.states.shape == (2, 4)


# --- t-SNE ---


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(MissingExtra, match=r"pip install hiddenstate\[analysis\]"):
        hs.measure.compare(torch.randn(5, 2, 3), method="tsne")


def test_tsne_is_asked_for_a_map(monkeypatch):
    asked = {}

    class TSNE:
        def __init__(self, components, **options):
            asked.update(options, components=components)

        def fit_transform(self, states):
            assert isinstance(states, np.ndarray)
            return states[:, : asked["components"]]

    manifold = ModuleType("sklearn.manifold")
    manifold.TSNE = TSNE
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.manifold", manifold)
    states = torch.randn(10, 2, 3)
    found = hs.measure.compare(states, method="tsne", seed=5)
    assert torch.equal(found.coordinates, states[:, -1, :2])
    assert found.explained.isnan().all()
    assert (asked["random_state"], asked["perplexity"]) == (5, 3)
    assert "(t-SNE)" in str(found)
    with pytest.raises(BadInput, match="needs 4 sequences or more, but there are 3"):
        hs.measure.compare(states[:3], method="tsne")


def test_the_real_tsne_parts_two_clusters():
    pytest.importorskip("sklearn")
    states = torch.cat([torch.randn(10, 1, 5), torch.randn(10, 1, 5) + 20])
    found = hs.measure.compare(states, [0] * 10 + [1] * 10, method="tsne")
    assert found.coordinates.shape == (20, 2)
    assert found.agreement == 1


@pytest.mark.parametrize("rows", [6, 12, 24])
def test_tsne_of_a_few_sequences_throws_none_of_them_far_away(rows):
    pytest.importorskip("sklearn")
    half = torch.randn(rows // 2, 24, generator=torch.Generator().manual_seed(0))
    found = hs.measure.compare(torch.cat([0.3 * half, 0.3 * half.flip(0) + 2]), method="tsne")
    assert found.coordinates.abs().max() < 100


# --- what cannot be compared ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a trajectory, or model= and inputs="),
        ({"traj": torch.zeros(1, 1, 1), "model": nn.GRU(1, 1)}, "one of the two"),
        ({"traj": torch.zeros(3, 1, 1), "labels": ["a"]}, "1 labels for 3 sequences"),
        ({"traj": torch.zeros(3, 1, 1), "components": 0}, "1 dimension or more, not 0"),
        ({"traj": torch.zeros(3, 1, 1), "pool": "sum"}, "one of last, mean and max, but is 'sum'"),
        ({"traj": torch.zeros(3, 1, 1), "method": "umap"}, "pca or tsne, but is 'umap'"),
        ({"traj": torch.full((1, 1, 1), float("nan"))}, "nan at step 0 of row 0"),
        ({"traj": torch.zeros(0, 1, 1)}, "nothing to measure: 0 rows"),
        ({"traj": Trajectory(torch.zeros(2, 3, 1), torch.tensor([3, 0]))}, "row 1 has no real step"),
        ({"model": Reader(), "inputs": []}, "there are no inputs"),
        ({"model": Reader(), "inputs": ["abc"]}, "input 0 is a string: give tokenize="),
        ({"model": Reader(), "inputs": [torch.tensor([1]), torch.tensor([])]}, "input 1 has no steps"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.compare(**options)


def test_a_model_without_states_is_refused():
    with pytest.raises(NotRecurrent, match="Linear has no recurrent layer"):
        hs.measure.compare(model=nn.Linear(2, 2), inputs=[torch.zeros(3, 2)])


def test_a_carried_state_is_neither_used_nor_changed_by_running_texts():
    model = Reader()
    expected = hs.measure.compare(model=model, inputs=TEXTS, tokenize=letters).states
    with hs.Carry(model) as carry:
        model(torch.randint(26, (2, 4)))
        before = carry.state
        torch.testing.assert_close(hs.measure.compare(model=model, inputs=TEXTS, tokenize=letters).states, expected)
        assert all(torch.equal(carry.state[part], before[part]) for part in before)


def test_stacked_h_n_of_one_layer_beside_labels_is_compared():
    _, h_n = nn.GRU(3, 4, batch_first=True)(torch.randn(5, 6, 3))
    found = hs.measure.compare(h_n, labels=list("aabbb"))
    torch.testing.assert_close(found.states, h_n[0].detach())


def test_the_pair_of_an_lstm_is_told_to_give_h():
    _, state = nn.LSTM(3, 4, batch_first=True)(torch.randn(5, 6, 3))
    with pytest.raises(BadInput, match=r"Of \(h_n, c_n\) give h_n\[-1\]"):
        hs.measure.compare(state)


# --- a plain tensor of three axes: states along time, or stacked final states ---


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("form", ["tensor", "array"])
def test_as_many_layers_as_labelled_sequences_are_refused(kind, layers, form):
    _, state = kind(3, 6, layers)(torch.randn(9, layers, 3))
    h_n = (state[0] if kind is nn.LSTM else state).detach()
    labels = list("abc")[:layers]
    with pytest.raises(BadInput, match=r"may be .* or stacked final states, h_n, .* labels fit both. Give h_n\[-1\]"):
        hs.measure.compare(h_n if form == "tensor" else h_n.numpy(), labels)
    assert torch.equal(hs.measure.compare(h_n[-1], labels).states, h_n[-1])
    told = hs.measure.compare(h_n, labels, lengths=torch.full((layers,), layers))
    assert torch.equal(told.states, h_n[:, -1])


@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 5, 6), (4, 4, 6)])
@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_without_labels_the_result_says_what_was_taken(shape, pool):
    found = hs.measure.compare(torch.randn(shape), pool=pool)
    taken = f"{shape[0]} states (of each row of {shape}, the {pool} of {shape[1]} steps; of h_n give h_n[-1]) in 2"
    assert taken in str(found)


@pytest.mark.parametrize(
    ("states", "options"),
    [
        (torch.randn(3, 5, 6), {"labels": "abc"}),
        (torch.randn(3, 5, 6), {"lengths": torch.tensor([1, 2, 5])}),
        (torch.randn(3, 6), {}),
        (torch.randn(3, 1, 6), {}),
        (Trajectory(torch.randn(3, 3, 6)), {"labels": "abc"}),
    ],
)
def test_what_is_clear_is_not_talked_about(states, options):
    assert hs.measure.compare(states, **options).taken == ""


@pytest.mark.parametrize(
    ("model", "one", "axis"),
    [
        (nn.GRU(3, 6), torch.randn(5, 1, 3), 1),
        (nn.LSTM(3, 6, batch_first=True), torch.randn(1, 5, 3), 0),
        (nn.Sequential(nn.Embedding(9, 3), nn.GRU(3, 6, batch_first=True)), torch.ones(1, 5, dtype=torch.int64), 0),
        (nn.GRUCell(3, 6), torch.randn(5, 1, 3), 1),
    ],
)
def test_inputs_that_are_batched_already_are_refused_with_the_way_out(model, one, axis):
    with pytest.raises(BadInput, match=rf"single sequences, .* without a batch axis.*give x.squeeze\({axis}\)"):
        hs.measure.compare(model=model, inputs=[one, one])
    assert len(hs.measure.compare(model=model, inputs=[one.squeeze(axis)] * 2).states) == 2


def test_an_input_that_the_model_does_not_take_is_named():
    with pytest.raises(
        BadInput, match=r"input 1 has shape \(5, 4\), and GRU does not take it as one row \(RuntimeError"
    ):
        hs.measure.compare(model=nn.GRU(3, 6), inputs=[torch.randn(5, 3), torch.randn(5, 4)])
