import weakref

import numpy as np
import pytest
import torch

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.measure.series import as_series, first_bad, refuse_bad, valid_steps
from hiddenstate.recording import Trajectory

NAN = float("nan")


def test_what_padding_holds_is_gone():
    values = torch.full((2, 3, 2), NAN)
    values[0, :2] = 1.0
    values[1, :1] = 2.0
    series = as_series(values, torch.tensor([2, 1]))
    assert series.entries.tolist() == [[1, 1], [1, 1], [2, 2]]
    assert series.final.tolist() == [[1, 1], [2, 2]]
    assert not series.values.isnan().any()


def test_the_caller_keeps_his_tensor():
    values = torch.full((1, 2, 1), NAN)
    as_series(values, torch.tensor([1]))
    assert values.isnan().all()


def test_a_part_or_a_gate_of_a_trajectory_is_asked_for_by_name():
    ones = torch.ones(1, 2, 3)
    traj = Trajectory(ones, c=2 * ones, gates={"forget": 3 * ones}, others={"slow": 4 * ones})
    found = [float(as_series(traj, part=part).values.mean()) for part in ("h", "c", "forget", "slow")]
    assert found == [1, 2, 3, 4]


def test_half_precision_is_summed_in_more():
    assert as_series(torch.ones(1, 2, 3, dtype=torch.bfloat16)).values.dtype == torch.float32


def test_the_graph_is_left_behind():
    assert not as_series(torch.ones(1, 2, 3, requires_grad=True)).values.requires_grad


def test_the_first_bad_value_is_the_earliest_in_time():
    values = torch.zeros(3, 4, 2)
    values[0, 3, 0] = NAN
    values[2, 1, 1] = float("inf")
    assert first_bad(values, valid_steps(values, None)) == (2, 1, 1)
    with pytest.raises(BadInput, match=r"has inf at step 1 of row 2 \(unit 1\), the first of 2 .*statistics"):
        refuse_bad(as_series(values))


def test_finite_values_pass():
    series = as_series(torch.zeros(1, 2, 3))
    assert refuse_bad(series) is series


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (torch.zeros(4, 3), None, r"\(batch, time, unit\), but this tensor has shape \(4, 3\).*unsqueeze\(0\)"),
        (torch.zeros(2, 3, 1), torch.tensor([1]), r"lengths have shape \(1,\), but there are 2 rows"),
        (torch.zeros(2, 3, 1), torch.tensor([1, 4]), r"lengths go from 1 to 4, but there are 3 steps"),
        (torch.zeros(2, 3, 1), torch.tensor([1.0, 2.0]), r"lengths are torch.float32, but whole numbers"),
        (torch.zeros(0, 3, 1), None, r"nothing to measure: 0 rows of 3 steps"),
        (torch.zeros(2, 3, 1), torch.tensor([0, 0]), r"nothing to measure: 2 rows.*all lengths are 0"),
        (torch.zeros(2, 3, 1, dtype=torch.int64), None, r"is torch.int64, but states are floating"),
        ("states", None, r"Trajectory or a tensor.*this is str"),
        (Trajectory(torch.zeros(2, 3, 1)), torch.tensor([1, 2]), r"knows its own lengths"),
    ],
)
def test_what_cannot_be_measured_is_refused(values, lengths, message):
    with pytest.raises(BadInput, match=message):
        as_series(values, lengths)


def test_an_unknown_part_is_refused_with_those_there_are():
    with pytest.raises(BadInput, match=r"no 'forget'; it has h, c\. .*gates=True"):
        as_series(Trajectory(torch.zeros(1, 1, 1), c=torch.zeros(1, 1, 1)), part="forget")


MEASURES = [hs.measure.saturation, hs.measure.dead_units, hs.measure.statistics, hs.measure.dimension]


@pytest.mark.parametrize("measure", MEASURES)
def test_many_runs_are_refused_where_they_are_not_of_one_track(measure):
    one = torch.randn(2, 3, 4)
    with pytest.raises(BadInput, match="run 1 has 5 units, but those before it have 4"):
        measure([one, torch.randn(2, 3, 5)])
    with pytest.raises(BadInput, match=r"trajectories by track \(l0, l1\).*recording.runs\('l0'\)"):
        measure({"l0": one, "l1": one})
    with pytest.raises(BadInput, match=r"no run at all. An iterator that was used up"):
        measure(iter([]))
    with pytest.raises(BadInput, match="this array is of object: often rows of unequal length"):
        measure(np.array([None, None]))


@pytest.mark.parametrize("measure", MEASURES)
def test_an_iterator_is_asked_for_one_run_at_a_time(measure):
    alive = []

    def runs():
        for _ in range(4):
            run = torch.randn(2, 50, 4)
            alive.append(weakref.ref(run))
            assert sum(one() is not None for one in alive) <= 2  # this one, and at most the one before it
            yield run

    measure(runs())


@pytest.mark.parametrize("measure", MEASURES)
def test_an_array_gives_what_its_tensor_gives(measure):
    values = torch.randn(2, 5, 3)
    assert str(measure(values.numpy())) == str(measure(values))
    frozen = values.numpy().copy()
    frozen.flags.writeable = False
    assert str(measure(frozen)) == str(measure(values))


@pytest.mark.parametrize(
    "measure", [hs.measure.statistics, hs.measure.saturation, hs.measure.dead_units, hs.measure.dimension]
)
def test_final_states_are_taken_where_steps_do_not_matter(measure):
    _, h_n = torch.nn.GRU(3, 8, num_layers=2, batch_first=True)(torch.randn(5, 6, 3))
    final = h_n[-1].detach()
    for states in (final, final.numpy(), [final[:2], final[2:]], [final[:2].unsqueeze(1), final[2:].numpy()]):
        assert str(measure(states)) == str(measure(final.unsqueeze(1)))


def test_a_model_or_a_layers_whole_result_in_place_of_states_is_told_what_to_give():
    gru = torch.nn.GRU(3, 8, batch_first=True)
    with pytest.raises(BadInput, match=r"this is GRU. States of a model are recorded.*runs_of\(model, loader\)"):
        hs.measure.statistics(gru)
    with pytest.raises(BadInput, match=r"this is tuple. A recurrent layer returns \(output, state\): give its output"):
        hs.measure.saturation(torch.nn.LSTM(3, 8)(torch.randn(4, 2, 3)))


def many_runs():
    gru, generator = torch.nn.GRU(3, 8, batch_first=True), torch.Generator().manual_seed(0)
    with hs.record(gru) as recording:
        for rows, steps in ((12, 6), (12, 9), (7, 4)):
            gru(torch.randn(rows, steps, 3, generator=generator))
    return recording


@pytest.mark.parametrize(
    "measure",
    [
        lambda states: hs.measure.statistics(states),
        lambda states: hs.measure.saturation(states, 0.2),
        lambda states: hs.measure.dimension(states),
        lambda states: hs.measure.compare(states, labels=(torch.arange(31) % 3).tolist()),
        lambda states: hs.measure.compare(states, pool="mean"),
        lambda states: hs.measure.novelty(states, states),
        lambda states: hs.measure.automaton(states, [[0] * 9] * 31, 2),
    ],
)
def test_a_recording_of_many_runs_is_measured_as_all_their_rows(measure):
    recording = many_runs()
    assert str(measure(recording.stacked("l0"))) == str(measure(recording.runs("l0"))) == str(measure(recording))


def test_a_probe_of_a_recording_of_many_runs_is_one_for_each_track():
    recording, targets = many_runs(), torch.arange(31) % 2
    found = hs.measure.probe(recording, targets)
    assert list(found) == ["l0"]
    torch.testing.assert_close(
        found["l0"].accuracy, hs.measure.probe(recording.stacked("l0"), targets).accuracy, equal_nan=True
    )


def test_a_recording_of_several_tracks_is_asked_for_one_of_them():
    lstm = torch.nn.LSTM(3, 4, num_layers=2, batch_first=True)
    with hs.record(lstm) as recording:
        lstm(torch.randn(2, 5, 3))
    with pytest.raises(
        BadInput, match=r"by track \(l0, l1\).*recording\['l0'\], or all its runs, recording.runs\('l0'\)"
    ):
        hs.measure.statistics(recording)


def test_a_packed_sequence_is_measured_by_its_real_steps():
    rows = [torch.randn(n, 3) for n in (7, 2, 5)]
    packed, final = torch.nn.GRU(3, 8)(torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False))
    assert hs.measure.statistics(packed).count == hs.measure.statistics([packed]).count == 14
    assert "of 14 steps" in str(hs.measure.novelty(packed, packed))
    torch.testing.assert_close(hs.measure.compare(packed).states, final[0].detach())


@pytest.mark.parametrize("name", ["saturation", "statistics", "dead_units", "dimension", "novelty"])
def test_a_loader_of_inputs_is_not_taken_for_states(name):
    measured = getattr(hs.measure, name)
    x = torch.randn(12, 5, 3)
    given = [x] if name == "novelty" else []
    for data in (torch.utils.data.DataLoader(x), torch.utils.data.TensorDataset(x)):
        with pytest.raises(BadInput, match=r"It holds inputs: their states are hs\.measure\.runs_of\(model, loader\)"):
            measured(*given, data)
