"""The commands: what they print, how they end, and one readable line for every mistake."""

import json

import numpy
import pytest
import torch
from safetensors.torch import save_file

import hiddenstate as hs
from hiddenstate.cli import app

COMMANDS = ("demo", "layers", "diagnose", "report", "bench", "serve")


def test_the_version_is_that_of_the_library(run):
    assert run("--version").out == f"hiddenstate {hs.__version__}\n"


def test_without_a_command_there_is_help(run):
    ran = run()
    assert (ran.code, ran.err) == (0, "")
    assert "Usage" in ran.out


@pytest.mark.parametrize("command", ["diagnose", "report", "bench"])
def test_inputs_that_do_not_fit_are_one_line_with_the_shape_that_is_wanted(run, here, command):
    numpy.save(here / "x.npy", numpy.zeros((2, 6, 5)))
    ran = run(command, "my_models:gru", "-i", "x.npy")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("error: GRU cannot be called with (2, 6, 5) float32: ")
    assert ran.err.endswith("takes (batch, time, 3).\n")


def test_a_diagnosis_without_inputs_names_the_options_that_give_them(run):
    ran = run("diagnose", "my_models:healthy")
    assert ran.code == 2
    assert ran.err.endswith("On the command line: --input x.npy, or --text.\n")


def test_help_names_every_command(run):
    said = run("--help").out
    assert all(command in said for command in COMMANDS)
    assert "--install-completion" in said


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_every_command_that_takes_a_model_takes_its_weights(run, command, here):
    ran = run(command, "my_models:gru", "--weights", "none.pt")
    assert (ran.code, ran.err) == (2, "error: there is no file none.pt.\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run, command):
    ran = run(command, "--help")
    assert ran.code == 0
    assert "Usage" in ran.out


class TestLayers:
    def test_it_is_a_table(self, run):
        ran = run("layers", "my_models:healthy")
        assert ran.code == 0
        assert all(word in ran.out for word in ("lstm", "h 7, c 7"))

    def test_as_json(self, run):
        (layer,) = json.loads(run("layers", "my_models:healthy", "--json").out)
        assert layer == {
            "name": "lstm", "kind": "lstm", "state": {"h": 7, "c": 7}, "layers": 1, "directions": 1, "input": 5,
            "tracks": ["lstm.l0"],
        }  # fmt: skip

    def test_a_module_and_a_file_are_taken_too(self, run):
        assert json.loads(run("layers", "my_models:gru", "--json").out)[0]["kind"] == "gru"
        assert json.loads(run("layers", "my_models.py:gru", "--json").out)[0]["kind"] == "gru"

    def test_none_is_an_error_for_people_and_an_empty_list_for_tools(self, run):
        ran = run("layers", "my_models:plain")
        assert ran.code == 2
        assert ran.err.startswith("error: my_models:plain has no recurrent layer. hs.register teaches")
        assert json.loads(run("layers", "my_models:plain", "--json").out) == []


class TestDiagnose:
    def test_a_sick_model_ends_with_one_and_is_told_why(self, run):
        ran = run("diagnose", "my_models:sick")
        assert ran.code == 1
        assert "HS101" in ran.out

    def test_a_healthy_model_ends_with_zero(self, run):
        assert run("diagnose", "my_models:healthy", "--text", "some text").code == 0

    @pytest.mark.parametrize(("fail_on", "code"), [("error", 1), ("note", 1), ("never", 0)])
    def test_what_counts_as_failure_can_be_chosen(self, run, fail_on, code):
        assert run("diagnose", "my_models:sick", "--fail-on", fail_on).code == code

    def test_a_code_can_be_ignored(self, run):
        ran = run("diagnose", "my_models:sick", "--ignore", "HS101", "--json")
        assert "HS101" not in {finding["code"] for finding in json.loads(ran.out)["findings"]}

    def test_as_json_and_as_sarif(self, run):
        found = json.loads(run("diagnose", "my_models:sick", "--json").out)
        assert not found["ok"]
        assert found["findings"][0]["code"] == "HS101"
        sarif = json.loads(run("diagnose", "my_models:sick", "--sarif").out)
        assert sarif["runs"][0]["results"][0]["ruleId"] == "HS101"

    def test_a_wrong_grade_is_refused(self, run):
        ran = run("diagnose", "my_models:sick", "--fail-on", "always")
        assert (ran.code, ran.err) == (2, "error: --fail-on is one of error, warning, note, never, but is 'always'.\n")


class TestReport:
    def test_it_writes_a_page_and_says_where(self, run, here):
        ran = run("report", "my_models:healthy", "--text", "a text", "-o", "out/page.html")
        assert ran.code == 0, ran.err
        assert ran.out.startswith(str(here / "out" / "page.html"))
        assert "2 · t" in (here / "out" / "page.html").read_text(encoding="utf-8")

    def test_as_json(self, run, here):
        numpy.save(here / "x.npy", numpy.random.default_rng(0).normal(size=(2, 6, 3)))
        said = json.loads(run("report", "my_models:gru", "-i", "x.npy", "--json").out)
        assert said["path"] == str(here / "report.html")
        assert said["bytes"] == (here / "report.html").stat().st_size

    def test_a_path_that_cannot_be_written_is_one_line(self, run, here):
        ran = run("report", "my_models:healthy", "--text", "abc", "-o", "my_models.py/r.html")
        assert ran.code == 2
        assert ran.err.startswith("error: the report cannot be written to my_models.py/r.html")


class TestBench:
    def test_ratios_are_within_one_run(self, run):
        costs = json.loads(run("bench", "my_models:sick", "--rounds", "2", "--json").out)
        assert [cost["name"] for cost in costs] == ["plain forward", "record states", "record gates", "carry"]
        assert costs[0]["ratio"] == 1
        assert all(cost["low"] <= cost["ratio"] <= cost["high"] for cost in costs)

    def test_it_is_a_table_and_needs_no_model(self, run):
        ran = run("bench", "--rounds", "1")
        assert ran.code == 0
        assert "record gates" in ran.out

    def test_what_accelerate_would_bring_is_told_with_what_was_decided(self, run, here):
        numpy.save(here / "x.npy", numpy.zeros((2, 12, 3)))
        ran = run("bench", "my_models:gru", "-i", "x.npy", "--accelerate", "--rounds", "2")
        assert ran.code == 0
        assert ran.out.count("accelerated") == 2
        assert "the model itself: GRU, up to 2 rows of 16 steps, forward and backward: by " in ran.out

    def test_a_model_without_inputs_is_refused(self, run):
        ran = run("bench", "my_models:healthy")
        assert (ran.code, ran.err) == (
            2,
            "error: a bench needs what the model is called with: --input x.npy, or --text.\n",
        )


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["layers", "my_models"], "a model is named package.module:name or file.py:name, but this is 'my_models'."),
            (["layers", "my_modls:gru"], "there is no module named 'my_modls', looked for from "),
            (["layers", "my_models:grv"], "my_models has nothing named 'grv'. Did you mean gru?"),
            (["layers", "missing.py:gru"], "there is no file missing.py."),
            (["layers", "my_models:number"], "my_models:number is int: a model, or a function that makes one, is"),
            (["layers", "my_models:sized"], "cannot be called without arguments (missing a required argument"),
            (["layers", "my_models:Tagger.__name__"], "is str: a model"),
            (["report", "my_models:gru", "-i", "none.npy"], "there is no file none.npy."),
            (["report", "my_models:gru", "-i", "my_models.py"], "an input is a .npy, .safetensors or .csv file"),
            (["report", "my_models:gru"], "a report needs what the model is called with"),
            (["report", "my_models:healthy", "--text", ""], "--text is empty"),
            (["report", "my_models:healthy", "--text", "é"], "has token 195, but the embedding has 128 entries. They"),
            (["report", "my_models:healthy", "--text", "a", "-i", "x.npy"], "give --input or --text, not both"),
            (["frobnicate"], "No such command 'frobnicate'"),
            (["layers"], "Missing argument '"),
            (["bench", "--rounds", "0"], "Invalid value for '--rounds'"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_one_readable_line(self, run, arguments, message):
        ran = run(*arguments)
        assert ran.code == 2
        assert ran.out == ""
        assert ran.err.count("\n") == 1
        assert ran.err.startswith("error: ")
        assert message in ran.err

    def test_debug_shows_the_traceback(self, run):
        ran = run("layers", "my_models:grv", "--debug")
        assert ran.code == 2
        assert "Traceback" in ran.err
        assert "load_object" in ran.err

    def test_an_error_nobody_expected_is_short_too(self, run, monkeypatch):
        monkeypatch.setattr(app, "find_layers", lambda _: {}["surprise"])
        ran = run("layers", "my_models:gru")
        assert ran.code == 2
        assert "Traceback" not in ran.err
        assert ran.err.endswith("This was not expected; --debug shows the whole traceback.\n")

    def test_an_interrupt_ends_quietly(self, run, monkeypatch):
        monkeypatch.setattr(app, "find_layers", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        ran = run("layers", "my_models:gru")
        assert ran.code == 130
        assert "Traceback" not in ran.err


class TestTheirCode:
    def test_an_error_in_their_factory_shows_their_traceback_and_not_ours(self, run):
        ran = run("layers", "my_models:broken")
        assert ran.code == 2
        assert "in broken\n    return 1 / 0" in ran.err
        assert "hiddenstate/cli" not in ran.err
        assert ran.err.endswith("error: my_models:broken() failed: ZeroDivisionError: division by zero\n")

    def test_an_error_in_their_module_shows_their_traceback_and_not_ours(self, run, here):
        (here / "bad_import.py").write_text("import my_models\nimport not_installed_anywhere\n")
        for name in ("bad_import:model", "bad_import.py:model"):
            ran = run("layers", name)
            assert ran.code == 2
            assert "line 2, in <module>" in ran.err
            assert "hiddenstate/cli" not in ran.err
            assert "importlib" not in ran.err
            assert ran.err.endswith("failed: ModuleNotFoundError: No module named 'not_installed_anywhere'\n")

    def test_an_error_of_syntax_is_shown_where_it_is(self, run, here):
        (here / "bad_syntax.py").write_text("def f(:\n")
        ran = run("layers", "bad_syntax:f")
        assert ran.code == 2
        assert "def f(:" in ran.err
        assert "hiddenstate/cli" not in ran.err


class TestInputs:
    def test_files_of_every_kind_are_the_same_input(self, run, here):
        x = numpy.random.default_rng(0).normal(size=(1, 6, 3)).astype("float32")
        numpy.save(here / "x.npy", x)
        save_file({"x": torch.from_numpy(x)}, here / "x.safetensors")
        save_file({"x": torch.from_numpy(x), "y": torch.zeros(1)}, here / "two.safetensors")
        numpy.savetxt(here / "x.csv", x[0], delimiter=",")
        numpy.savetxt(here / "named.csv", x[0], delimiter=",", header="a,b,c", comments="")
        pages = set()
        for name in ("x.npy", "x.safetensors", "two.safetensors:x", "x.csv", "named.csv"):
            assert run("report", "my_models:gru", "-i", name).code == 0
            page = (here / "report.html").read_text(encoding="utf-8")
            start = page.index('id="track-l0-h-data"')
            pages.add(page[start : page.index("</script>", start)])
        assert len(pages) == 1

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("two.safetensors", {"a": torch.zeros(1), "b": torch.zeros(1)}, "2 tensors (a, b): name one as two.safe"),
            ("empty.csv", "", "empty.csv is empty"),
            ("names.csv", "a,b\n", "names.csv has no lines with numbers"),
            ("torn.npy", "no array", "torn.npy is no file of numpy"),
            ("words.csv", "1,2\nx,y\n", "words.csv cannot be read as .csv"),
        ],
    )  # fmt: skip
    def test_a_file_that_cannot_be_read_is_named(self, run, here, name, content, message):
        if isinstance(content, dict):
            save_file(content, here / name)
        else:
            (here / name).write_text(content)
        ran = run("report", "my_models:gru", "-i", name)
        assert ran.code == 2
        assert message in ran.err
        assert ran.err.count("\n") == 1

    def test_a_name_that_a_file_lacks_is_refused(self, run, here):
        save_file({"a": torch.zeros(1)}, here / "one.safetensors")
        assert "has no tensor 'b', only a" in run("report", "my_models:gru", "-i", "one.safetensors:b").err

    def test_text_goes_through_the_encoder_that_is_named(self, run, here):
        assert run("report", "my_models:healthy", "--text", "é!", "--encode", "my_models:encode").code == 0
        assert "0 · é" in (here / "report.html").read_text(encoding="utf-8")

    def test_an_encoder_that_fails_shows_its_own_traceback(self, run, here):
        ran = run("report", "my_models:healthy", "--text", "x", "--encode", "my_models:broken")
        assert ran.code == 2
        assert "error: my_models:broken failed on the text: TypeError" in ran.err


def test_as_a_program_it_ends_with_the_same_codes(shell):
    assert shell("diagnose", "my_models:sick").code == 1
    ran = shell("layers", "my_models:nothing")
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_shell_completion_is_there(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "hiddenstate" in shell("--show-completion", "bash").out
