import pytest
import torch

from hiddenstate.measure.ridge import Readout, explained, held_out


def everything(rows):
    return torch.ones(1, rows, dtype=torch.bool)


def test_what_is_linear_is_found_exactly():
    features = torch.randn(1, 50, 6, dtype=torch.float64) * torch.logspace(-3, 3, 6, dtype=torch.float64)
    targets = features @ torch.randn(6, 2, dtype=torch.float64) + 5
    found = Readout().predict(features, targets, everything(50))
    torch.testing.assert_close(found, targets, rtol=1e-4, atol=1e-4)


def test_a_chosen_penalty_gives_ordinary_ridge_regression():
    features = torch.randn(1, 40, 5, dtype=torch.float64)
    targets = torch.randn(1, 40, 1, dtype=torch.float64)
    found = Readout(weakest=100.0).predict(features, targets, everything(40))
    scaled = (features[0] - features[0].mean(0)) / features[0].std(0, correction=0)
    penalty = 100.0 * torch.linalg.svdvals(scaled)[0] ** 2
    weights = torch.linalg.solve(
        scaled.T @ scaled + penalty * torch.eye(5, dtype=torch.float64), scaled.T @ (targets[0] - targets[0].mean())
    )
    torch.testing.assert_close(found[0], scaled @ weights + targets[0].mean())


def test_rows_outside_the_training_set_have_no_influence():
    features, targets = torch.randn(1, 30, 4, dtype=torch.float64), torch.randn(1, 30, 1, dtype=torch.float64)
    train = everything(30)
    train[0, 20:] = False
    before = Readout().predict(features, targets, train)[:, :20]
    targets[:, 20:] = 1e6
    features[:, 25:] = -1e3
    torch.testing.assert_close(Readout().predict(features, targets, train)[:, :20], before)


def test_steps_do_not_mix():
    features, targets = torch.randn(3, 30, 4, dtype=torch.float64), torch.randn(3, 30, 2, dtype=torch.float64)
    train = torch.rand(3, 30) < 0.8
    together = Readout().predict(features, targets, train)
    for step in range(3):
        one = slice(step, step + 1)
        torch.testing.assert_close(Readout().predict(features[one], targets[one], train[one]), together[one])


def test_groups_of_outputs_do_not_mix():
    features, targets = torch.randn(2, 30, 4, dtype=torch.float64), torch.randn(2, 30, 6, dtype=torch.float64)
    targets[..., :2] = features[..., :2]
    together = Readout(groups=3).predict(features, targets, torch.ones(2, 30, dtype=torch.bool))
    for begin in (0, 2, 4):
        piece = slice(begin, begin + 2)
        alone = Readout().predict(features, targets[..., piece], torch.ones(2, 30, dtype=torch.bool))
        torch.testing.assert_close(together[..., piece], alone)


def test_noise_is_not_memorized_when_units_outnumber_rows():
    features, targets = torch.randn(1, 20, 100, dtype=torch.float64), torch.randn(1, 20, 1, dtype=torch.float64)
    found = held_out(features, targets, (torch.arange(20) % 5).unsqueeze(0), Readout())
    assert float(explained(targets, found, everything(20))) < 0.3


def test_held_out_rows_are_predicted_without_themselves():
    features, targets = torch.randn(1, 12, 2, dtype=torch.float64), torch.randn(1, 12, 1, dtype=torch.float64)
    folds = torch.arange(12) % 3
    before = held_out(features, targets, folds.unsqueeze(0), Readout())
    targets[:, folds == 1] = 1e3
    after = held_out(features, targets, folds.unsqueeze(0), Readout())
    torch.testing.assert_close(after[:, folds == 1], before[:, folds == 1])


def test_explained_is_one_for_truth_zero_for_the_mean_and_nothing_without_variance():
    targets = torch.randn(2, 10, 1, dtype=torch.float64)
    valid = torch.ones(2, 10, dtype=torch.bool)
    assert explained(targets, targets, valid).tolist() == [1, 1]
    assert explained(targets, targets.mean(1, keepdim=True).expand(2, 10, 1), valid).tolist() == pytest.approx([0, 0])
    assert explained(torch.ones(1, 3, 1), torch.ones(1, 3, 1), valid[:1, :3]).isnan().all()
