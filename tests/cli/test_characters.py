"""The model and the text of the demo: a carried state helps, and nothing of the judged text was trained on."""

import torch

from hiddenstate.cli.characters import STEPS, CharacterModel, Text, judge, train


def test_a_carried_state_helps_on_unseen_text():
    text = Text()
    losses = {}
    for carried in (False, True):
        torch.manual_seed(0)
        model = CharacterModel(len(text.symbols), units=32)
        train(model, text.seen[:40_000], 90, carried=carried, tell=lambda: None)
        losses[carried] = judge(model, text.unseen[:8000], carried=carried)
    assert losses[True] < losses[False]


def test_training_goes_on_beyond_the_end_of_the_text():
    text = Text()
    told = []
    train(CharacterModel(len(text.symbols), units=4), text.seen[:2000], 9, carried=True, tell=lambda: told.append(1))
    assert len(told) == 9


def test_text_is_read_back_as_it_was():
    text = Text()
    assert "".join(text.decode(text.encode("hidden state"))) == "hidden state"
    rows = text.prose(3, 50)
    assert rows.shape == (3, 50)
    assert sum(symbol.isalpha() for symbol in text.decode(rows[0])) > 30


def test_the_text_is_split_into_what_is_seen_and_what_is_not():
    text = Text()
    whole = len(text.seen) + len(text.unseen)
    assert len(text.seen) == int(0.95 * whole)
    assert torch.equal(text.encode("".join(text.decode(text.unseen))), text.unseen)


def test_prose_is_taken_from_the_unseen_text():
    text = Text()
    unseen = "".join(text.decode(text.unseen))
    assert all("".join(text.decode(row)) in unseen for row in text.prose(3, 50))


def test_the_loss_is_a_mean_over_characters_and_a_model_without_weights_is_as_good_as_chance():
    text = Text()
    model = CharacterModel(len(text.symbols), units=4)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    chance = torch.tensor(float(len(text.symbols))).log()
    for carried in (False, True):
        loss = judge(model, text.unseen[: 64 * STEPS + 7], carried=carried)
        torch.testing.assert_close(torch.tensor(loss), chance, rtol=1e-5, atol=0)
