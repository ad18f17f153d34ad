"""The commands. Each parses its arguments, calls one function of the library, and prints the result."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from ..cells import layers as find_layers
from ..errors import BadInput, HiddenStateError, NotRecurrent
from .loaders import TheirCodeFailed, load_inputs, load_model, load_text
from .serve import serve

app = typer.Typer(
    name="hiddenstate",
    help="The toolkit for the hidden state of recurrent models in PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(serve)

_OURS = str(Path(__file__).resolve().parents[1])

Model = Annotated[
    str, typer.Argument(help="package.module:factory or file.py:factory; a model, or a function of none.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", "-i", help="A .npy, .safetensors or .csv file; once for each argument of the model."),
]
Text = Annotated[str | None, typer.Option("--text", help="Text as input: UTF-8 bytes, or what --encode makes of it.")]
Encode = Annotated[str | None, typer.Option("--encode", help="package.module:function from a text to token numbers.")]
BatchAxis = Annotated[int, typer.Option("--batch-axis", min=0, max=1, help="1 for a model that takes time first.")]
Weights = Annotated[
    str | None, typer.Option("--weights", help="A checkpoint: .safetensors, or of a .pt file its tensors alone.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for tools.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit code 0 when all is well, 1 when a diagnosis fails, 2 on any error."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in given
    try:
        code = app([one for one in given if one != "--debug"], standalone_mode=False, prog_name="hiddenstate")
    except HiddenStateError as error:
        _show(error, debug=debug)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        _show(error, debug=debug)
        if not debug and not hasattr(error, "format_message"):
            print("This was not expected; --debug shows the whole traceback.", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _show(error: BaseException, *, debug: bool) -> None:
    """Print an error on stderr in one line; if the user's code raised it, after their part of the traceback."""
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, TheirCodeFailed) and error.__cause__ is not None:
        cause = error.__cause__
        traceback.print_exception(type(cause), cause, _their_part(cause.__traceback__))
    print(f"error: {_one_line(error)}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks; its type if it has no message."""
    said = getattr(error, "format_message", error.__str__)()  # a usage error then names its option, too
    return " ".join(str(said).split()) or type(error).__name__


def _their_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the first frames, which belong to this library or to the import system."""
    here = trace
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        if not name.startswith((_OURS, "<frozen")) and "importlib" not in name:
            return here
        here = here.tb_next
    return trace if trace is None or trace.tb_next is None else None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hiddenstate {metadata.version('hiddenstate')}")
        raise typer.Exit()


@app.callback()
def _everywhere(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where to put the report.")] = Path("demo"),
    updates: Annotated[int, typer.Option("--updates", min=1, help="Training steps of each model.")] = 860,
) -> None:
    """Carry, see and diagnose the state of a small character model, in about a minute."""
    from .demo import show_all

    show_all(folder, updates, Console())


@app.command()
def layers(model: Model, weights: Weights = None, as_json: Json = False) -> None:
    """List the recurrent layers of a model."""
    found = find_layers(load_model(model, weights)[0])
    if as_json:
        typer.echo(json.dumps([_plain(layer) for layer in found], indent=2))
        return
    if not found:
        raise NotRecurrent(f"{model} has no recurrent layer. hs.register teaches kinds that are not known yet.")
    table = Table("name", "kind", "state", "layers", "directions", "input")
    for one in map(_plain, found):
        state = ", ".join(f"{part} {size}" for part, size in one["state"].items())
        width = "?" if one["input"] is None else str(one["input"])
        table.add_row(
            one["name"] or "(the model)", one["kind"], state, str(one["layers"]), str(one["directions"]), width
        )
    Console().print(table)


@app.command()
def diagnose(
    model: Model,
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    text: Text = None,
    encode: Encode = None,
    batch_axis: BatchAxis = 0,
    fail_on: Annotated[
        str, typer.Option("--fail-on", help="Exit with 1 from: error, warning, note, or never.")
    ] = "error",
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="A code that is not wanted, as HS501.")] = None,
    as_json: Json = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF, for code hosts and editors.")] = False,
) -> None:
    """Say what is wrong with a model's hidden state; exit with 1 on errors, so that CI can use it."""
    from ..diagnosis import diagnose as examine
    from ..reporting import misfit

    grades = ("error", "warning", "note", "never")
    if fail_on not in grades:
        raise BadInput(f"--fail-on is one of {', '.join(grades)}, but is {fail_on!r}.")
    made, given, _ = _loaded(model, inputs, text, weights=weights, encode=encode, batch_axis=batch_axis)
    try:
        found = examine(made, *given, batch_axis=batch_axis, ignore=ignore or ())
    except BadInput as error:
        raise error if given else BadInput(f"{error} On the command line: --input x.npy, or --text.") from error
    if as_json or sarif:
        typer.echo(json.dumps(found.to_sarif() if sarif else found.to_dict(), indent=2))
    else:
        if not found.broken:  # else the error below says it
            typer.echo(str(found))
    if found.broken:
        raise BadInput(misfit(made, given, found.broken))
    worst = found.worst()
    raise typer.Exit(int(bool(worst) and fail_on != "never" and grades.index(worst) <= grades.index(fail_on)))


@app.command()
def report(
    model: Model,
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    text: Text = None,
    encode: Encode = None,
    batch_axis: BatchAxis = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write one self-contained page about a model's hidden state."""
    from ..reporting import report as write

    made, given, tokens = _loaded(model, inputs, text, weights=weights, encode=encode, batch_axis=batch_axis)
    if not given:
        raise BadInput("a report needs what the model is called with: --input x.npy, or --text.")
    console = Console(stderr=True)
    with console.status("starting") as status:
        where = write(made, *given, path=output, tokens=tokens, batch_axis=batch_axis, tell=status.update)
    if as_json:
        typer.echo(json.dumps({"path": str(where.resolve()), "bytes": where.stat().st_size}))
    else:
        typer.echo(f"{where.resolve()} ({where.stat().st_size / 1e6:.1f} MB)")


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="As for the others; an LSTM of 256 units without it.")] = None,
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    text: Text = None,
    encode: Encode = None,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="Time what hs.accelerate would bring instead.")
    ] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each rival takes its turn.")] = 20,
    as_json: Json = False,
) -> None:
    """Time what recording and carrying cost beside the plain call of a model, on this machine."""
    from dataclasses import asdict

    from ..reporting import misfit
    from .bench import bench as time_them
    from .bench import bench_accelerated

    if model is None:
        import torch

        lstm: nn.Module = nn.LSTM(64, 256, batch_first=True)
        made, given = lstm, (torch.randn(16, 100, 64),)
    else:
        made, given, _ = _loaded(model, inputs, text, weights=weights, encode=encode)
        if not given:
            raise BadInput("a bench needs what the model is called with: --input x.npy, or --text.")
    said = ""
    try:
        if accelerate:
            costs, said = bench_accelerated(made, given, rounds)
        else:
            costs = time_them(made, given, rounds)
    except HiddenStateError:
        raise
    except Exception as error:
        raise BadInput(misfit(made, given, f"{type(error).__name__}: {error}")) from error
    if as_json:
        typer.echo(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    firsts = any(cost.first is not None for cost in costs)
    table = Table("", "ratio", "middle half of the rounds", "ms", *(["first call, ms"] if firsts else []))
    for cost in costs:
        first = "" if cost.first is None else f"{cost.first:.2f}"
        numbers = (f"x {cost.ratio:.3f}", f"{cost.low:.3f} to {cost.high:.3f}", f"{cost.milliseconds:.2f}")
        table.add_row(cost.name, *numbers, *([first] if firsts else []))
    Console().print(table)
    if firsts:
        typer.echo(
            "Ratios are of later calls, without gradients, with all values read. The first call within a block also "
            "looks for recurrence in the model's own code."
        )
    if said:
        typer.echo(said)


def _loaded(
    name: str,
    files: list[str] | None,
    text: str | None = None,
    *,
    weights: str | None,
    encode: str | None = None,
    batch_axis: int = 0,
) -> tuple[nn.Module, tuple[Any, ...], list[str] | None]:
    model, inputs = load_model(name, weights)
    if text is not None and files:
        raise BadInput("give --input or --text, not both: a model is called with one or the other.")
    if text is not None:
        x, tokens = load_text(text, encode, model, batch_axis=batch_axis)
        return model, (x,), tokens
    return model, load_inputs(files, model, batch_axis=batch_axis) if files else inputs, None


def _plain(layer: Any) -> dict[str, Any]:
    spec = layer.spec
    return {
        "name": layer.name,
        "kind": layer.kind,
        "state": {part: spec.sizes[part] for part in spec.parts},
        "layers": spec.layers,
        "directions": spec.directions,
        "input": spec.input_size,
        "tracks": list(layer.tracks),
    }
