import torch
from torch import nn

from hiddenstate.unrolling.learning import layer_for
from tests.support.cells import LayerNormLSTMCell


def test_a_step_teaches_the_state_of_a_cell_also_where_an_ensemble_holds_its_weights():
    cells, x = [LayerNormLSTMCell(3, 4) for _ in range(2)], torch.randn(5, 6, 3)
    weights, _ = torch.func.stack_module_state(cells)
    seen = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cells[0]

        def forward(self, x):
            seen.append(layer_for(self.cell, x).initial(1))
            return x

    named = {f"cell.{name}": weight for name, weight in weights.items()}
    model = Looking()
    torch.vmap(lambda weights: torch.func.functional_call(model, weights, (x,)))(named)
    plain = layer_for(LayerNormLSTMCell(3, 4), x).initial(1)
    assert {name: part.shape for name, part in seen[0].items()} == {name: part.shape for name, part in plain.items()}
    assert all(type(weight) is nn.Parameter for weight in cells[0].parameters())
