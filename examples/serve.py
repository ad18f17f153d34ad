"""A thousand sensors, one state each: a streaming anomaly detector that is killed in the middle and loses nothing.

python examples/serve.py

A small GRU learns to predict the next reading; where it is surprised, something is wrong. The detector runs in a
process of its own with its sessions in SQLite. We kill it, as a power cut would, start it again, and compare all alarms
and all states with a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import hiddenstate as hs

SENSORS, STEPS, KILLED_AFTER = 1000, 60, 25
FAULTY = {17: 31, 404: 12, 808: 45}  # sensor -> the step at which it fails


class Detector(nn.Module):
    """Predicts the next reading, and says by how much the last prediction was off."""

    def __init__(self) -> None:
        """Make a small GRU and a head for it."""
        super().__init__()
        self.gru = nn.GRU(2, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted next reading for (batch, time, 2): a reading and how it changed."""
        return self.head(self.gru(x)[0])


def reading(step: int) -> Tensor:
    """What all sensors measure at a step: a wave of their own each, a little noise, and a fault in three of them."""
    sensor = torch.arange(SENSORS)
    noise = torch.randn(SENSORS, generator=torch.Generator().manual_seed(step)) * 0.01
    values = torch.sin(step * (0.2 + 0.3 * sensor / SENSORS) + sensor) + noise
    for faulty, since in FAULTY.items():
        if step >= since:
            values[faulty] += 3.0 if step % 2 else -3.0
    return values


def features(step: int) -> Tensor:
    """The input of one step for every sensor (sensor, 2)."""
    return torch.stack([reading(step), reading(step) - reading(step - 1)], dim=1)


def trained() -> Detector:
    """A detector that has seen healthy waves; the same one every time."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        time = torch.arange(41) * (0.2 + 0.3 * torch.rand(64, 1)) + 7 * torch.rand(64, 1)
        wave = torch.sin(time)  # (batch, time)
        x = torch.stack([wave[:, 1:-1], wave[:, 1:-1] - wave[:, :-2]], dim=2)
        loss = (model(x).squeeze(2) - wave[:, 2:])[:, 5:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def detect(model: Detector, store: str) -> None:
    """Feed every sensor's session, from where the store says it is, and print an alarm for every surprise."""
    names = [f"sensor-{n:04d}" for n in range(SENSORS)]
    with hs.serve.Engine(model, store, max_batch=SENSORS, max_sessions=SENSORS) as engine:
        asyncio.run(begin(engine, names))
        # All sessions advance in one transaction, but a cut between two of them is fine too: an input that is
        # repeated with its number is answered again and not applied again.
        done = min(engine.info(name).seq for name in names)
        print(json.dumps({"from": done}), flush=True)
        predicted = engine.push_many(names, features(done), seqs=[done] * SENSORS) if done else None
        for step in range(done + 1, STEPS + 1):
            surprise = (predicted.squeeze(1) - reading(step)).abs() if predicted is not None else torch.zeros(SENSORS)
            predicted = engine.push_many(names, features(step), seqs=[step] * SENSORS)
            alarms = [int(n) for n in (surprise > 1.0).nonzero()[:, 0]] if step > 5 else []
            print(json.dumps({"step": step, "alarms": alarms}), flush=True)


async def begin(engine: hs.serve.Engine, names: list[str]) -> None:
    """Begin all sessions that are not there, in a few transactions."""
    await asyncio.gather(*(engine.aopen(name, exist_ok=True) for name in names))


def watch(store: str, *, kill_after: int | None = None) -> dict[int, list[int]]:
    """Run the detector in a process of its own, kill it after a step or let it end, and return its alarms."""
    alarms: dict[int, list[int]] = {}
    command = [sys.executable, __file__, "--detect", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "from" in said:
                print(f"detector runs from step {said['from']}")
                continue
            alarms[said["step"]] = said["alarms"]
            if said["step"] == kill_after:
                process.kill()
                print(f"killed after step {kill_after}")
                break
    return alarms


def main() -> None:
    """Compare a run that was killed with one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        cut, calm = (f"sqlite:///{Path(folder, name)}.db" for name in ("cut", "calm"))
        alarms = watch(cut, kill_after=KILLED_AFTER)
        alarms |= watch(cut)
        wanted = watch(calm)
        states = []
        for store in (cut, calm):
            with hs.serve.Engine(trained(), store) as engine:
                states.append([engine.export(name) for name in engine.sessions()])
    caught = {n: min(step for step, found in alarms.items() if n in found) for n in FAULTY}
    print(f"faults caught, sensor: step = {caught}; they began at {FAULTY}")
    print(f"false alarms: {sum(n not in FAULTY for found in alarms.values() for n in found)}")
    print(f"steps seen: {len(alarms)} of {STEPS}; alarms as without the kill: {alarms == wanted}")
    print(f"states equal to the last bit: {states[0] == states[1]} ({len(states[0])} sessions)")
    if alarms != wanted or states[0] != states[1]:
        sys.exit("something was lost")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--detect", metavar="STORE", help="be the detector, with sessions in this store")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    if settings.detect:
        detect(trained(), settings.detect)
    else:
        main()
