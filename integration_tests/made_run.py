"""A run directory as a long run leaves it, made without training."""

from __future__ import annotations

import datetime
import json
import math
import random
from pathlib import Path

from fairlead_runs.step_times import StepTimes, times_folder

EPOCH = 1_780_000_000.0
SLOW = 13
"""The rank that computes longer than the others."""


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = EPOCH

    def __call__(self) -> float:
        return self.now


def make_run(path: Path, *, steps: int, ranks: int, starts: int = 3, name: str = "loss", lr: float = 0.1) -> Path:
    """A finished run of several starts, each but the last preempted or failed, with `steps` rows of metrics."""
    path.mkdir(parents=True)
    (path / "checkpoints").mkdir()
    job = f"run: {{name: {path.name}}}\nmodel: {{class: 'm:M', args: {{lr: {lr}}}}}\ntrainer: {{max_steps: {steps}}}\n"
    (path / "job.yaml").write_text(job)
    (path / "fingerprint.json").write_text(json.dumps({"format": 1, "digest": "0" * 64, "settings": {}}))
    clock, events, each, lost = Clock(), [], steps // starts, 0

    def event(kind: str, start: int, **fields: object) -> None:
        when = datetime.datetime.fromtimestamp(clock.now, datetime.UTC).isoformat(timespec="milliseconds")
        events.append({"time": when, "event": kind, "rank": 0, "host": "n0", "pid": 1, "start": start, **fields})

    begin = 0
    for start in range(1, starts + 1):
        event("start", start, world_size=ranks, resumed_from="x" if begin else None)
        clock.now += 30.0
        event("training", start, step=begin, epoch=0)
        end = steps if start == starts else start * each
        _times(path, start, begin, end, ranks, clock)
        event("checkpoint", start, step=end - lost, seconds=1.5, metrics={f"val/{name}": 1.0 / start}, path="-")
        if start == starts:
            event("finished", start, step=end, epoch=1, reason=f"max_steps {steps}", limits={})
        elif start % 2:
            event("stop", start, step=end, reason="PREEMPTED")
            event("requeue", start, by="slurm", step=end)
        else:
            event("failed", start, step=end, error="RuntimeError: <script>alert(1)</script> & no luck")
            lost = each // 10
        begin = end - lost
        clock.now += 60.0
    (path / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    numbers = random.Random(0)
    with (path / "metrics.csv").open("w") as file:
        file.write(f"step,epoch,train/{name},val/{name},lr\n")
        for step in range(1, steps + 1):
            noise = 1 + 0.1 * numbers.random()
            held_out = f"{2 / math.sqrt(1 + step / 500):.6f}" if step % 100 == 0 else ""
            file.write(f"{step},0,{noise * 2 / math.sqrt(1 + step / 400):.6f},{held_out},{lr}\n")
    folder = path / "starts" / str(starts)
    folder.mkdir(parents=True)
    default = {"value": None, "reason": "the default"}
    settings = {"devices": {"value": 8, "reason": "SLURM_NTASKS_PER_NODE"}, "max_time": default}
    (folder / "resolution.json").write_text(json.dumps(settings))
    provenance = {"python": {"version": "3.11.7"}, "argv": ["fairlead", "fit"], "packages": ["torch==2.13.0"]}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return path


def _times(path: Path, start: int, begin: int, end: int, ranks: int, clock: Clock) -> None:
    """Rank 0's series in twenty periods; the others have the same sums, but for a slow one."""
    began = clock.now
    for rank in [*range(1, ranks), 0]:
        clock.now = began
        node, local = divmod(rank, 8)
        times = StepTimes(
            times_folder(path, start),
            node=node,
            local_rank=local,
            rank=rank,
            host=f"n{node}",
            clock=clock,
            now=clock,
            interval_s=1.0,
        )
        times.facts = lambda rank=rank: {"comm_s": 0.0 if rank == SLOW else 0.03, "comm_bytes": 4e8, "workers": 2.0}  # type: ignore[misc]
        times.beat("setup", begin)
        times.beat("first-batch", begin)
        parts = 20 if rank == 0 else 2
        for part in range(1, parts + 1):
            step = begin + 1 if part == 1 else begin + (end - begin) * part // parts
            done = 1 if part == 1 else step - begin - 1 - (0 if part == 2 else (end - begin) * (part - 1) // parts - 1)
            for name, seconds in (("data", 0.01), ("forward", 0.05 if rank == SLOW else 0.02), ("backward", 0.06)):
                times.at(name)
                clock.now += max(1, done) * (0.03 if name == "backward" and rank == SLOW else seconds)
            times.at("optimizer")
            clock.now += max(1, done) * 0.01
            times.at("logging")
            times.beat("train", step)
        times.beat("validate", end)
        clock.now += 12.0
        times.beat("save", end)
        clock.now += 1.5
        times.close()
