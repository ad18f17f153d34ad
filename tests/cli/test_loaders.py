"""What a command is given: models by name, inputs from files, text as numbers."""

import re

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hiddenstate.cli.loaders import TheirCodeFailed, load_inputs, load_model, load_object, load_text, load_weights
from hiddenstate.errors import BadInput


@pytest.mark.parametrize("place", ["my_models", "my_models.py"])
def test_a_model_is_an_object_or_what_a_function_returns(here, place):
    assert isinstance(load_model(f"{place}:gru")[0], nn.GRU)
    model, inputs = load_model(f"{place}:sick")
    assert (type(model).__name__, inputs[0].shape) == ("Tagger", (4, 9))


def test_names_may_lead_into_a_class(here):
    assert load_object("my_models:Tagger.forward", "a method").__name__ == "forward"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_models", "a model is named package.module:name or file.py:name, but this is 'my_models'"),
        (":gru", "but this is ':gru'"),
        ("my_modls:gru", "there is no module named 'my_modls', looked for from"),
        ("my_models:grv", "my_models has nothing named 'grv'. Did you mean gru?"),
        ("missing.py:gru", "there is no file missing.py"),
        ("my_models:number", "my_models:number is int: a model, or a function that makes one, is needed"),
        ("my_models:sized", "cannot be called without arguments"),
        ("builtins:dict", "builtins:dict returned dict: an nn.Module, or"),
    ],
)
def test_a_name_that_leads_to_no_model_says_why(here, name, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        load_model(name)


def test_what_their_code_raises_is_the_cause(here):
    with pytest.raises(TheirCodeFailed, match=r"my_models:broken\(\) failed: ZeroDivisionError") as failed:
        load_model("my_models:broken")
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    (here / "bad_import.py").write_text("import not_installed_anywhere")
    with pytest.raises(TheirCodeFailed, match="importing bad_import failed: ModuleNotFoundError"):
        load_model("bad_import:model")


def test_every_kind_of_file_holds_the_same_input(here):
    x = numpy.random.default_rng(0).normal(size=(6, 3))
    numpy.save(here / "x.npy", x[None])
    save_file({"x": torch.from_numpy(x[None]), "y": torch.zeros(1)}, here / "two.safetensors")
    numpy.savetxt(here / "x.csv", x, delimiter=",", header="a,b,c", comments="")
    for name in ("x.npy", "two.safetensors:x", "x.csv"):
        (found,) = load_inputs([name], nn.GRU(3, 4))
        torch.testing.assert_close(found, torch.from_numpy(x[None]).float())
    (time_first,) = load_inputs(["x.csv"], nn.GRU(3, 4), batch_axis=1)
    assert time_first.shape == (6, 1, 3)


def test_floats_take_the_dtype_of_the_weights_and_whole_numbers_stay_whole(here):
    numpy.save(here / "x.npy", numpy.ones((1, 2), dtype="float32"))
    numpy.save(here / "n.npy", numpy.ones((1, 2), dtype="int16"))
    x, n = load_inputs(["x.npy", "n.npy"], nn.Linear(2, 2).double())
    assert (x.dtype, n.dtype) == (torch.float64, torch.int64)


def test_a_pickle_is_never_opened(here):
    numpy.save(here / "objects.npy", numpy.array([{}], dtype=object))
    with pytest.raises(BadInput, match=r"objects.npy holds Python objects, not numbers; pickles are never opened"):
        load_inputs(["objects.npy"], nn.GRU(3, 4))
    (here / "x.pt").write_bytes(b"")
    with pytest.raises(BadInput, match=r"but this is x.pt. Pickles are never opened"):
        load_inputs(["x.pt"], nn.GRU(3, 4))


@pytest.mark.parametrize(
    ("text", "numbers", "tokens"),
    [("ab", [97, 98], ["a", "b"]), ("é!", [195, 169, 33], ["c3", "a9", "!"])],
)
def test_text_is_its_bytes(text, numbers, tokens):
    x, shown = load_text(text, None, nn.GRU(3, 4))
    assert (x.tolist(), shown) == ([numbers], tokens)
    assert load_text(text, None, nn.GRU(3, 4), batch_axis=1)[0].shape == (len(numbers), 1)


def test_an_encoder_of_ones_own_is_asked(here):
    x, shown = load_text("é!", "my_models:encode", nn.GRU(3, 4))
    assert (x.tolist(), shown) == ([[1, 1]], ["é", "!"])
    with pytest.raises(TheirCodeFailed, match="my_models:broken failed on the text: TypeError"):
        load_text("x", "my_models:broken", nn.GRU(3, 4))


def test_a_token_beyond_the_embedding_is_refused():
    model = nn.Sequential(nn.Embedding(128, 2), nn.GRU(2, 3))
    with pytest.raises(BadInput, match=r"token 195, but the embedding has 128 entries. They are UTF-8 bytes"):
        load_text("é", None, model)
    with pytest.raises(BadInput, match="--text is empty"):
        load_text("", None, model)


def wrapped(weights):
    """A state dict as training loops save it."""
    return {
        "plain": weights,
        "lightning": {"state_dict": weights, "epoch": 3},
        "loop": {"model_state_dict": weights, "optimizer": {"lr": 0.1}},
        "ddp": {f"module.{name}": value for name, value in weights.items()},
        "compiled ddp": {"model": {f"module._orig_mod.{name}": value for name, value in weights.items()}},
    }


@pytest.mark.parametrize("form", wrapped({}))
def test_weights_are_found_however_a_loop_saved_them(tmp_path, form):
    trained, fresh = nn.GRU(2, 3), nn.GRU(2, 3)
    torch.save(wrapped(trained.state_dict())[form], tmp_path / "weights.pt")
    load_weights(fresh, str(tmp_path / "weights.pt"))
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_weights_come_from_safetensors_too(tmp_path):
    trained, fresh = nn.GRU(2, 3), nn.GRU(2, 3)
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    load_weights(fresh, str(tmp_path / "weights.safetensors"))
    assert torch.equal(fresh.weight_hh_l0, trained.weight_hh_l0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.GRU(2, 4), "of another shape are bias_hh_l0, bias_ih_l0, weight_hh_l0, weight_ih_l0"),
        (nn.GRU(2, 3, bias=False), "it lacks bias_hh_l0, bias_ih_l0"),
        (nn.GRU(2, 3, num_layers=3), r"the model has no bias_hh_l1, .* and 4 more"),
    ],
)
def test_weights_of_another_model_are_refused_by_name_and_nothing_is_changed(tmp_path, other, said):
    torch.save(other.state_dict(), tmp_path / "weights.pt")
    model = nn.GRU(2, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadInput, match=f"not those of GRU: {said}"):
        load_weights(model, str(tmp_path / "weights.pt"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_that_holds_code_is_not_opened(tmp_path):
    torch.save(nn.GRU(2, 3), tmp_path / "model.pt")
    with pytest.raises(
        BadInput,
        match=r"model\.pt cannot be read as weights \(UnpicklingError\): it is no checkpoint.*safetensors file",
    ):
        load_weights(nn.GRU(2, 3), str(tmp_path / "model.pt"))
    with pytest.raises(BadInput, match=r"there is no file .*none\.pt"):
        load_weights(nn.GRU(2, 3), str(tmp_path / "none.pt"))


@pytest.mark.parametrize("content", [b"", b"not numpy's", b"\x80\x04N."])
def test_a_file_that_only_bears_the_name_of_an_array_is_told_to_be_none(here, content):
    (here / "x.npy").write_bytes(content)
    with pytest.raises(BadInput, match=r"x.npy is no file of numpy's, whatever its name: numpy.save"):
        load_inputs(["x.npy"], nn.GRU(3, 4))
