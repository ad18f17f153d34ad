"""Where gradients arrive: at steps, layers and parameters, beside what autograd says when asked directly."""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.probes.gradients import (
    Backward,
    ParameterGradients,
    Summaries,
    arrives,
    gradients,
    in_torch_layers,
    matters,
    objective,
    projected,
)
from tests.support.admitted import admitted


class Net(nn.Module):
    """A layer, and something done with its output."""

    def __init__(self, head):
        super().__init__()
        self.gru, self.head, self.unused = nn.GRU(3, 4, batch_first=True), head, nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.gru(x)[0])


def test_every_entry_takes_part_in_the_projection_and_infinite_ones_do_no_harm():
    y = torch.randn(3, 4, requires_grad=True)
    masked = torch.where(torch.eye(3, 4).bool(), -torch.inf, y)
    (gradient,) = gradients(projected(masked), [y])
    assert gradient.isfinite().all()
    assert ((gradient != 0) == ~torch.eye(3, 4).bool()).all()
    assert len(set(gradient[gradient != 0].tolist())) == 9


def test_what_is_not_in_the_graph_has_no_gradient():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = gradients((2 * a).sum(), [a, b])
    assert found[0].tolist() == [2, 2]
    assert found[1] is None
    assert not arrives(found[1], torch.zeros(2))
    assert arrives(found[1], found[0])


def test_the_steps_that_a_gradient_reaches_are_those_that_the_output_follows():
    x = torch.randn(4, 6, 3)
    with admitted(Net(lambda out: out[:, -1]), x) as patient:
        sizes = patient[Backward].steps["the input"]
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(projected(patient.model(leaf)[:, :]), [leaf])
        torch.testing.assert_close(sizes.float(), wanted.norm(dim=2))
    with admitted(Net(lambda out: out[:, 2]), x) as patient:
        sizes = patient[Backward].steps["the input"]
        assert (sizes[:, :3] > 0).all()
        assert (sizes[:, 3:] == 0).all()


def test_a_layer_that_ends_in_one_value_for_each_row_is_a_summary():
    with admitted(Net(lambda out: out[:, -1]), torch.randn(4, 6, 3)) as patient:
        (arrival,) = patient[Summaries]
        assert arrival.call.layer.name == "gru"
        assert (arrival.output[:, :-1] == 0).all()
        assert (arrival.output[:, -1] != 0).all()
    with admitted(Net(lambda out: out), torch.randn(4, 6, 3)) as patient:
        assert patient[Summaries] == ()


@pytest.mark.parametrize("name", ["gru.weight_hh_l0", "unused.weight"])
def test_a_parameter_that_no_output_follows_gets_no_gradient_and_does_not_matter(name):
    used = not name.startswith("unused")
    with admitted(Net(lambda out: out), torch.randn(4, 6, 3)) as patient:
        found = patient[ParameterGradients]
        assert (found.usable, found.batches, found.infinite) == (True, 3, ())
        assert (found.sizes[name] > 0) == (name not in found.missing) == used
        before = dict(patient.model.named_parameters())[name].clone()
        assert matters(patient, name) == used
        assert torch.equal(dict(patient.model.named_parameters())[name], before)


def test_the_loss_is_what_is_asked_where_there_is_one():
    with admitted(Net(lambda out: out), torch.randn(4, 6, 3)) as patient:
        patient.loss, patient.targets = (lambda y, target: (y * target).sum()), torch.zeros(4, 6, 4)
        assert objective(patient, patient.run(grad=True)) == 0
        assert not patient[ParameterGradients].usable  # every gradient is zero


def test_the_parameters_of_torchs_own_layers_are_known():
    assert in_torch_layers(Net(nn.Linear(4, 2))) == {
        *("gru.weight_ih_l0", "gru.weight_hh_l0", "gru.bias_ih_l0", "gru.bias_hh_l0")
    }
