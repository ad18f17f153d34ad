import pytest
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.measure.invented import invented


@pytest.mark.parametrize("time_axis", [0, 1])
def test_time_is_where_the_model_wants_it(time_axis):
    model = nn.Sequential(nn.GRU(3, 4, batch_first=time_axis == 1))
    shape = invented(model, 2, 7, time_axis=time_axis).shape
    assert tuple(shape) == ((2, 7, 3) if time_axis == 1 else (7, 2, 3))


def test_a_model_that_takes_nothing_that_could_be_made_up_is_refused():
    with pytest.raises(BadInput, match="no input could be made up that Bilinear takes"):
        invented(nn.Bilinear(2, 3, 4), 2, 5, time_axis=1)
