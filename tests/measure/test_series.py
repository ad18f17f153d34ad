import pytest
import torch

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
