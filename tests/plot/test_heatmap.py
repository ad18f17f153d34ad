import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot

from hiddenstate import record
from hiddenstate.errors import BadInput
from hiddenstate.plot import heatmap, ordered
from hiddenstate.recording import Trajectory
from tests.plot.gallery import title, walk, waves


def shown(ax):
    pyplot.close(ax.get_figure())  # hypothesis draws many in one test
    return torch.from_numpy(ax.images[0].get_array().filled(torch.nan))


def test_units_go_down_and_steps_go_right():
    h = waves(steps=7, units=3)
    torch.testing.assert_close(shown(heatmap(h)), h[0].T)


@given(length=st.integers(1, 9), row=st.integers(0, 2))
def test_padding_is_not_drawn(length, row):
    h = waves(rows=3, steps=9)
    traj = Trajectory(h, torch.full((3,), length))
    torch.testing.assert_close(shown(heatmap(traj, row=row)), h[row, :length].T)


def test_zero_is_in_the_middle_of_the_colors():
    low, high = heatmap(torch.tensor([[[-0.2, 0.7]]])).images[0].get_clim()
    assert (low, high) == pytest.approx((-0.7, 0.7))


def test_a_gate_runs_from_closed_to_open():
    assert heatmap(walk(), part="forget").images[0].get_clim() == (0, 1)


def test_five_thousand_of_each_are_thinned_and_the_axes_say_so():
    ax = heatmap(torch.zeros(1, 5000, 5000))
    assert max(shown(ax).shape) <= 800
    assert ax.get_xlabel() == "step (means of 7 of 5,000 steps)"
    assert ax.get_ylabel() == "unit (every 13th of 5,000 units)"
    assert ax.get_xlim()[1] >= 4999
    assert ax.get_ylim()[0] >= 4999


def test_nan_is_black_and_counted():
    h = waves(steps=4, units=2).clone()
    h[0, 1, 1] = torch.nan
    h[0, 2, 1] = torch.inf
    ax = heatmap(h)
    assert ax.get_title(loc="left") == "2 of 8 values are NaN or Inf (black)"
    assert ax.images[0].get_cmap().get_bad().tolist() == [0, 0, 0, 1]
    heatmap(torch.full((1, 3, 2), torch.nan)).get_figure().canvas.draw()


def test_tokens_stand_under_their_steps_and_blanks_can_be_seen():
    ax = heatmap(waves(steps=4), tokens=["a", " ", "\n", "$x$"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "␣", "↵", r"\$x\$"]
    ax.get_figure().canvas.draw()  # a formula that is none would fail here


def test_of_many_tokens_every_nth_is_written():
    ax = heatmap(waves(steps=500), tokens=["x"] * 500)
    assert len(ax.get_xticks()) <= 48


def test_steps_of_a_thinned_recording_keep_their_numbers():
    ax = heatmap(Trajectory(waves(steps=5), every=10))
    assert ax.get_xlim() == (-0.5, 49.5)


@given(order=st.sampled_from(["size", "peak", "similar"]), units=st.integers(1, 9), steps=st.integers(1, 9))
def test_an_order_is_a_permutation(order, units, steps):
    assert sorted(ordered(torch.randn(steps, units), order).tolist()) == list(range(units))


def test_similar_units_become_neighbors():
    t = torch.linspace(0, 6, 50)
    values = torch.stack([t.sin(), t.cos(), t.sin() * 3, t.cos() * 0.1], dim=1)
    places = ordered(values, "similar").argsort()
    assert abs(places[0] - places[2]) == 1
    assert abs(places[1] - places[3]) == 1


def test_an_order_given_as_a_list_names_units():
    ax = heatmap(waves(units=4), order=[2, 0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["2", "0"]


def test_what_is_drawn_does_not_change_with_the_tensor():
    h = waves()
    ax = heatmap(h)
    before = shown(ax).clone()
    h.zero_()
    torch.testing.assert_close(shown(ax), before)


def test_gradients_half_precision_and_empty_sequences_are_drawn_too():
    torch.testing.assert_close(shown(heatmap(waves().requires_grad_())), waves()[0].T)
    torch.testing.assert_close(shown(heatmap(waves().half())), waves().half().float()[0].T)
    empty = heatmap(Trajectory(waves(), torch.tensor([0])))
    empty.get_figure().canvas.draw()
    assert not shown(empty).isfinite().any()


def test_gradients_through_time_are_a_heatmap_of_their_own():
    model = torch.nn.RNN(2, 4, batch_first=True)
    with record(model, grads=True) as rec:
        model(torch.randn(1, 30, 2))[0][:, -1].sum().backward()
    ax = heatmap(rec["l0"], part="grads.h", log=True)
    drawn = torch.from_numpy(ax.images[0].get_array().data)
    torch.testing.assert_close(drawn, rec["l0"].grads["h"][0].T.abs().clamp(min=float(drawn.min())))
    low, high = ax.images[0].get_clim()
    assert low < 1e-2 * high  # early steps are faint, and still seen
    by_hand = heatmap(rec["l0"].grads["h"].numpy(), log=True)  # as articles stack them
    assert by_hand.images[0].get_clim() == pytest.approx((low, high))


def test_on_a_log_scale_zero_is_dark_and_nan_is_black():
    ax = heatmap(torch.tensor([[[1.0, 0.0, -10.0, torch.nan]]]), log=True)
    assert ax.images[0].get_clim() == (1, 10)
    shown = ax.images[0].get_array()
    assert shown.mask.flatten().tolist() == [False, False, False, True]
    assert shown.data.flatten()[:3].tolist() == [1, 1, 10]
    heatmap(torch.zeros(1, 3, 2), log=True).get_figure().canvas.draw()


@pytest.mark.parametrize(("limits", "ends"), [(1, (-1, 1)), ((0, 2), (0, 2)), ((-3.0, 1.0), (-3, 1))])
def test_fixed_limits_make_pictures_comparable(limits, ends):
    for size in (0.1, 5.0):
        assert heatmap(waves() * size, limits=limits).images[0].get_clim() == ends


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: heatmap(torch.zeros(3)),
            r"\(batch, time, unit\) or \(time, unit\), but this is a tensor of shape \(3,\)",
        ),
        (lambda: heatmap({}), "there is no track in it: a recording has tracks once"),
        (lambda: heatmap({"l0": walk(), "l1": walk()}), r"by track \(l0, l1\), but this is about one: rec\['l0'\]"),
        (lambda: heatmap(waves(), row=1), "row 1 was asked for, but the trajectory has 1 rows"),
        (lambda: heatmap(walk(), tokens=["a"]), "there are 1 tokens, but 17 steps: one for each"),
        (lambda: heatmap(walk(), limits=0), "limits are one number above 0, or .*but are 0"),
        (lambda: heatmap(walk(), limits=(2, 1)), r"ends of the color scale, but are \(2, 1\)"),
        (lambda: heatmap(walk(), limits="all"), "but are 'all'"),
        (lambda: heatmap(walk(), limits=1, log=True), "a log scale begins above 0, but limits are 1"),
        (lambda: heatmap(walk(), part="z"), "the trajectory has no 'z'; it has h, c, input, forget"),
        (lambda: heatmap(Trajectory(waves()), part="forget"), r"hs.record\(model, gates=True\)"),
        (
            lambda: heatmap(waves(), order="name"),
            "order is size, peak, similar or a list of unit numbers, but is 'name'",
        ),
        (lambda: heatmap(waves(), order=[6]), "order names units 6 to 6, but there are 6"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_reason(call, message):
    with pytest.raises(BadInput, match=message):
        call()


@pytest.mark.parametrize("row", [2, -1])
def test_the_title_names_the_row_where_there_are_several(row):
    several = Trajectory(torch.randn(3, 9, 4), track="l0")
    assert title(heatmap(several, row=row)) == "l0 · h · row 2"
    assert title(heatmap(several.h[0])) == ""


def test_values_that_are_all_zero_are_said():
    assert title(heatmap(torch.zeros(1, 5, 4), log=True)) == "all 20 values are 0"
