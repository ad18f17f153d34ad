"""What does it cost to see every state and gate?

Rivals: the plain forward; `hs.record` (states only; all gates and cells; the same with every value read); the
step-by-step loop that tutorials use to get at gates and cells; torchlens, where it is installed, which sees a fused
layer's outputs only. For 1 and 3 layers, forward alone (without and with grad mode) and under training.
On CUDA the same where there is one. Last, how fast a recording of 100 steps gets to disk, beside plain writes.

    python benchmarks/record.py [--quick]
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import Comparison, compare, machine

SIZES = {"cpu": (32, 100, 64, 128), "cuda": (64, 512, 512, 512)}  # batch, time, feature, hidden
LARGER = {"cpu": (32, 100, 128, 256), "cuda": (64, 512, 1024, 1024)}


def by_hand(layer: nn.LSTM | nn.GRU, x: Tensor) -> list[Tensor]:
    """Every state and gate by a loop over steps, as tutorials do it."""
    kept: list[Tensor] = []
    for depth in range(layer.num_layers):
        w_ih, w_hh, b_ih, b_hh = (
            getattr(layer, f"{n}_l{depth}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = x.new_zeros(x.shape[1], layer.hidden_size)
        c, outs = h, []
        for step in x:
            if isinstance(layer, nn.LSTM):
                i, f, g, o = (step @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, 1)
                i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
                c = f * c + i * g
                h = o * c.tanh()
                kept += [part.detach() for part in (i, f, g, o, c)]
            else:
                (xr, xz, xn), (hr, hz, hn) = (step @ w_ih.T + b_ih).chunk(3, 1), (h @ w_hh.T + b_hh).chunk(3, 1)
                r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
                n = (xn + r * hn).tanh()
                h = (1 - z) * n + z * h
                kept += [part.detach() for part in (r, z, n)]
            outs.append(h)
        x = torch.stack(outs)
    return [x, *kept]


def rivals(layer: nn.LSTM | nn.GRU, x: Tensor, after: Callable[[Tensor], None]) -> dict[str, Callable[[], None]]:
    """Each way to run `layer`, followed by what is to be done with its output."""

    def run(context: AbstractContextManager[object]) -> object:
        with context as rec:
            after(layer(x)[0])
        return rec

    def read() -> None:
        rec = run(hs.record(layer, gates=True))
        assert isinstance(rec, hs.recording.Recording)
        for track in rec:
            rec[track]  # what was not left behind by the run is worked out here

    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: run(nullcontext()) and None,
        "hs.record: h": lambda: run(hs.record(layer)) and None,
        "hs.record: gates and cells": lambda: run(hs.record(layer, gates=True)) and None,
        "hs.record: all, and all read": read,
        "step-by-step loop": lambda: after(by_hand(layer, x)[0]),
    }
    if "--torchlens" not in sys.argv:  # once imported it wraps torch's functions, which slows every rival that steps
        return ways
    import torchlens

    ways["torchlens (no gates, no cells)"] = lambda: torchlens.trace(layer, x) and None
    return ways


def nothing(out: Tensor) -> None:
    """Leave the output alone."""


def settings(device: str, quick: bool) -> Iterator[tuple[str, Comparison]]:
    """Every comparison on one device, with its title."""
    # With one thread the time of the processor tells more: other work on the machine does not count.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    for sizes in (SIZES[device],) if quick else (SIZES[device], LARGER[device]):
        batch, steps, feature, hidden = sizes
        x = torch.randn(steps, batch, feature, device=device)
        for kind in (nn.LSTM, nn.GRU):
            for layers in (1, 3):
                layer = kind(feature, hidden, layers, device=device)

                def learn(out: Tensor, layer: nn.Module = layer) -> None:
                    layer.zero_grad()
                    out.sum().backward()

                title = (
                    f"{kind.__name__}, {layers} layers, batch {batch}, {steps} steps, {feature} -> {hidden}, {device}"
                )
                rounds = 5 if quick or device == "cuda" else 11
                with torch.no_grad():
                    yield f"{title}, no_grad", compare(rivals(layer, x, nothing), rounds=rounds, clock=clock)
                if not quick:
                    yield f"{title}, grad mode", compare(rivals(layer, x, nothing), rounds=rounds, clock=clock)
                yield f"{title}, training step", compare(rivals(layer, x, learn), rounds=rounds, clock=clock)


def to_disk() -> str:
    """How fast a recording reaches the disk, beside plain writes of as many bytes in files as large."""
    layer, x = nn.GRU(64, 256), torch.randn(200, 64, 64)
    with torch.no_grad(), hs.record(layer) as rec:
        for _ in range(100):  # each a run of its own: one that is handed over again is not written again
            layer(x)
    piece = memoryview(rec.runs("l0")[0].h.transpose(0, 1).contiguous().view(-1).view(torch.uint8).numpy())
    ratios, rates = [], []
    for _ in range(5):
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
        start = time.perf_counter()
        for n in range(100):
            with open(folder / str(n), "wb", buffering=0) as file:
                file.write(piece)
                if n == 99:
                    os.sync()
        plain = time.perf_counter() - start
        shutil.rmtree(folder)
        takes = _streamed(rec, folder)
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert written >= 100 * len(piece), f"{written} bytes were written of {100 * len(piece)}"
        shutil.rmtree(folder)
        rates.append(100 * len(piece) / takes / 1e6)
        ratios.append(plain / takes)
    middle = sorted(range(5), key=ratios.__getitem__)[2]
    return (
        f"100 runs of {len(piece) / 1e6:.1f} MB to disk: {rates[middle]:.0f} MB/s, {ratios[middle]:.2f} of plain writes"
    )


def _streamed(rec: "hs.recording.Recording", folder: Path) -> float:
    """Seconds to write 100 runs through a recording, without the model that made them."""
    from hiddenstate.recording.folder import Folder

    runs = rec._runs["l0"]  # type: ignore[attr-defined]
    start = time.perf_counter()
    writer = Folder(folder, {"every": 1, "tracks": ["l0"]})
    for run in runs:
        writer.add(run)
    writer.close()
    os.sync()
    return time.perf_counter() - start


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--torchlens", action="store_true", help="time torchlens too, where it is installed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    arguments = parser.parse_args()
    devices = [arguments.device] if arguments.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(machine())
    for device in devices:
        for title, table in settings(device, arguments.quick):
            print(f"\n{title}")
            print("\n".join(str(table).splitlines()[1:]), flush=True)
    print(f"\n{to_disk()}")


if __name__ == "__main__":
    main()
