import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory


def bits(rows, steps, seed=0):
    return torch.randint(2, (rows, steps), generator=torch.Generator().manual_seed(seed))


class Counter(nn.Module):
    """Ones modulo three, in a ring of three places and some noise, as a trained network would hold them."""

    def forward(self, x):
        turn = x.cumsum(1) % 3 * (2 * torch.pi / 3)
        ring = torch.stack([turn.cos(), turn.sin()], dim=2)
        return ring + 0.05 * torch.randn(ring.shape, generator=torch.Generator().manual_seed(1))


def test_a_network_that_counts_modulo_three_is_an_automaton_of_three_states():
    x = bits(60, 15)
    found = hs.measure.automaton(Counter()(x), x, targets=x.sum(1) % 3 == 0)
    assert found.start == 3
    assert (found.agreement, found.accuracy, found.held_out, found.rows) == (1.0, 1.0, True, 15)
    for row in bits(5, 40, seed=9).tolist():  # longer than any it has seen
        last = found.run(row)[-1]
        assert found.outputs[last] == (sum(row) % 3 == 0)
    assert "3 states, 2 tokens" in str(found)
    assert "100.0% of the targets right" in str(found)


def test_a_trained_gru_that_tells_parity_is_read_as_two_states():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = bits(256, 8, seed=3)
        model, head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.02)
        inputs, parity = nn.functional.one_hot(x, 2).float(), x.cumsum(1) % 2
        for _ in range(250):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(model(inputs)[0]).flatten(0, 1), parity.flatten()).backward()
            optimizer.step()
    with hs.record(model) as rec:
        model(inputs)
    found = hs.measure.automaton(rec["l0"], x, targets=parity)
    assert found.accuracy > 0.97
    assert found.start <= 4


def test_tokens_may_be_letters_in_rows_of_unequal_length():
    texts = ["abba", "ab", "b", "aabab"] * 4
    lengths = torch.tensor([len(text) for text in texts])
    h = torch.full((16, 5, 1), float("nan"))
    for row, text in enumerate(texts):
        for step, letter in enumerate(text):
            h[row, step] = float(letter == "b")
    found = hs.measure.automaton(Trajectory(h, lengths), texts, 2)
    assert found.tokens == ("a", "b")
    assert found.agreement == 1.0
    assert found.run("abz") == [*found.run("ab"), -1]
    assert found.states[2].tolist()[1:] == [-1] * 4


@given(seed=st.integers(0, 200))
def test_running_it_is_following_its_table(seed):
    x = bits(12, 6, seed=seed)
    h = torch.randn(12, 6, 3, generator=torch.Generator().manual_seed(seed))
    found = hs.measure.automaton(h, x, 3)
    for row in x.tolist():
        state, path = found.start, []
        for token in row:
            state = int(found.transitions[state, token]) if state >= 0 else -1
            path.append(state)
        assert found.run(row) == path
    assert 0 <= found.agreement <= 1


def test_of_few_rows_it_says_that_it_was_judged_by_those_it_was_made_of():
    x = bits(3, 9)
    found = hs.measure.automaton((x.cumsum(1) % 2).unsqueeze(2).float(), x, 2)
    assert not found.held_out
    assert "3 rows, those it was made of" in str(found)


def test_the_graph_has_an_arrow_for_each_transition():
    x = bits(20, 9)
    text = hs.measure.automaton((x.cumsum(1) % 2).unsqueeze(2).float(), x, 2, targets=x.cumsum(1) % 2).dot()
    assert text.startswith("digraph {")
    assert text.count("->") == 6  # two from each state, and from the start
    assert '[label="0"]' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": bits(4, 5)}, "how many states.*clusters=, or targets="),
        ({"tokens": bits(3, 5), "clusters": 2}, "tokens for 3 rows, but the states have 4"),
        ({"tokens": bits(4, 3), "clusters": 2}, "row 0 has 3 tokens, but 5 steps"),
        ({"tokens": bits(4, 5), "targets": [1, 2]}, "2 targets, but 4 rows"),
        ({"tokens": bits(4, 5), "clusters": 99}, "20 states fall into 1 to 20 clusters, but 99"),
    ],
)
def test_what_makes_no_automaton_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.automaton(torch.randn(4, 5, 2), **options)
