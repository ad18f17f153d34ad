"""A map of final states: every point in its place, with the name or the color that is its own."""

import pytest
import torch
from matplotlib import pyplot
from matplotlib.text import Text
from torch import nn

from hiddenstate import measure, plot, record
from hiddenstate.errors import BadInput
from tests.plot.gallery import sentences, texts, title, waves

SENTENCES = ["the dog barks", "a dog barked", "stocks fell", "shares fell"]


def points(ax):
    return torch.cat([torch.tensor(dots.get_offsets().data) for dots in ax.collections]).float()


def test_sentences_stand_beside_the_states_that_they_end_in():
    embed, lstm = nn.Embedding(128, 8), nn.LSTM(8, 16, batch_first=True)
    finals = []
    for sentence in SENTENCES:
        _, (h_n, _) = lstm(embed(torch.tensor([[ord(letter) for letter in sentence]])))
        finals.append(h_n[-1, 0].detach())
    found = measure.compare(torch.stack(finals), labels=SENTENCES)
    ax = plot.compare(found)
    assert texts(ax) == SENTENCES
    assert [tuple(text.xy) for text in ax.texts] == [tuple(place) for place in found.coordinates.tolist()]
    torch.testing.assert_close(points(ax), found.coordinates)
    assert "lie next to" not in title(ax)


def test_the_same_from_a_model_a_batch_and_a_list_of_states():
    model = nn.GRU(3, 5, batch_first=True)
    inputs = [torch.randn(steps, 3) for steps in (4, 6, 2, 9)]
    by_model = measure.compare(model=model, inputs=inputs, labels=SENTENCES)
    with torch.no_grad():
        finals = [model(x.unsqueeze(0))[1] for x in inputs]  # each (1, 1, unit)
    with record(model) as rec:
        packed = nn.utils.rnn.pack_sequence(inputs, enforce_sorted=False)
        model(packed)
    for other in (finals, torch.stack(finals), [h.squeeze().numpy() for h in finals], rec["l0"]):
        torch.testing.assert_close(measure.compare(other, labels=SENTENCES).states, by_model.states)
    assert texts(plot.compare(by_model)) == SENTENCES


def test_clusters_are_colored_and_named_with_their_sizes():
    ax = plot.compare(sentences())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [f"cluster {n} (2)" for n in range(3)]
    assert texts(ax)[:2] == ["the dog barks", r"a dog barked at \$5"]
    assert texts(ax)[-1].endswith("…")


def test_labels_that_several_rows_share_are_colors_and_texts_may_be_added():
    found = measure.compare(waves(rows=4), labels=["sport", "sport", "news", "news"])
    ax = plot.compare(found)
    assert texts(ax) == []
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["sport (2)", "news (2)"]
    assert "lie next to their own label" in title(ax)
    assert texts(plot.compare(found, texts=SENTENCES)) == SENTENCES


def test_names_do_not_cover_each_other_where_there_is_room():
    states = torch.zeros(5, 3)
    states[:, 0] = torch.arange(5) * 1e-3
    states[0] = 1.0
    ax = plot.compare(measure.compare(states, labels=[f"sentence number {n}" for n in range(5)]))
    renderer = ax.get_figure().canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in ax.texts]
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


def test_tsne_says_what_it_shows():
    pytest.importorskip("sklearn")
    found = measure.compare(torch.randn(12, 1, 5), labels=[str(n) for n in range(12)], method="tsne")
    ax = plot.compare(found)
    assert (ax.get_xlabel(), title(ax)) == ("t-SNE 1", "in t-SNE only neighborhoods count, not distances")


def test_three_components_have_depth():
    ax = plot.compare(measure.compare(waves(rows=5), labels=list("abcde"), components=3))
    assert ax.get_zlabel().startswith("PC 3")
    assert [text.get_text().strip() for text in ax.texts] == list("abcde")


def test_of_very_many_rows_the_names_are_left_out_and_it_is_said():
    ax = plot.compare(measure.compare(torch.randn(100, 1, 4), labels=[str(n) for n in range(100)]))
    assert texts(ax) == []
    assert title(ax) == "names of 100 rows left out"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.compare(waves()), "a result of measure.compare, but this is Tensor"),
        (lambda: plot.compare(measure.compare(waves(3), components=1)), "in 2 or 3 dimensions, but this one has 1"),
        (lambda: plot.compare(sentences(), texts=["a"]), "1 texts, but 6 rows: one for each row"),
        (lambda: plot.compare(measure.compare(waves(3), components=3), pyplot.gca()), "3 components need a 3-D ax"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_names_that_leave_no_room_are_left_out_and_counted():
    names = [f"a rather long sentence, of which this is number {number}" for number in range(50)]
    ax = plot.compare(measure.compare(torch.randn(50, 8), labels=names))
    written = len(ax.texts)
    assert 0 < written < 50
    assert title(ax) == f"no room for {50 - written} of 50 names"
    ax.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text).shrunk(0.8, 0.8) for text in ax.texts]  # without the lines to the points
    covered = [(one, other) for place, one in enumerate(boxes) for other in boxes[:place] if one.overlaps(other)]
    assert len(covered) <= 2  # sizes of names are estimates
    assert ax.get_position().width > 0.7  # names do not squeeze the picture


def test_states_that_are_all_the_same_are_said():
    assert title(plot.compare(measure.compare(torch.zeros(4, 3), labels=[0, 0, 1, 1]))) == "all states are the same"
