"""`fairlead bench scaling JOB`: what more workers are worth for the user's own job."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunFailedError
from fairlead.plugins import PluginManager, default_plugins
from fairlead_diagnostics.bench.cpus import usable_cpus
from fairlead_diagnostics.bench.layouts import Layout, Row, aligned, number
from fairlead_diagnostics.bench.plot import Line, plot, plot_file
from fairlead_diagnostics.bench.threads import Batch, batch_of_processes, load, measure_rows, new_row, refuse_ranks
from fairlead_diagnostics.bench.trials import Steps, TrialFailedError, Trials
from fairlead_runs.describe import counted

WORKERS: Final = (1, 2, 4, 8)
_KILLED_AT: Final = 6
"""The step behind which a rank is killed, to see how long the next one takes; the third and the sixth are saved."""


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Measures, prints a table; 1 where the largest number of workers is less efficient than requested."""
    drawn = plot_file(arguments.plot, session.cwd) if arguments.plot is not None else None
    record = measure(arguments, session)
    if arguments.json:
        session.print_json(record)
    else:
        for line in report(record):
            session.print(line)
    if drawn is not None:
        _plot(record, drawn)
    return 0 if record["ok"] else 1


def validate_scaling(
    job: str | os.PathLike[str],
    *,
    workers: Sequence[int] = WORKERS,
    at_least: float = 0.85,
    batch: Literal["global", "per_device"] | None = None,
    rounds: int = 3,
    seconds: float = 5.0,
    steps: int | None = None,
    launcher: str | None = None,
    overrides: Sequence[str] = (),
    cwd: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    plugins: PluginManager | None = None,
) -> dict[str, Any]:
    """Trains a job with some numbers of workers, prints speed-up and efficiency, and requires an efficiency.

    Args:
        job: The job file.
        workers: Their numbers; the smallest is the measure of the others.
        at_least: The efficiency that the largest has to reach, from 0 to 1.
        batch: What stays the same: that of all workers together, or that of each; see `fairlead bench scaling`.
        rounds: How often each is timed.
        seconds: Seconds of a timing.
        steps: Optimizer steps of a timing, instead of `seconds`.
        launcher: A command that starts the ranks, as `srun -n {workers}`; None: they are started on this machine.
        overrides: Settings, as `--set` has them.
        cwd: The working directory; None: this process's.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.

    Returns:
        The record that `fairlead bench scaling --json` prints.

    Raises:
        RunFailedError: It is less efficient, or could not be measured.
        ConfigError: The job or an argument is wrong.

    Example:
        >>> validate_scaling("job.yaml", workers=(1, 2), at_least=0.85)["ok"]  # doctest: +SKIP
        True
    """
    arguments = argparse.Namespace(
        job=[os.fspath(job)],
        overrides=list(overrides),
        workers=tuple(sorted(set(workers))),
        at_least=at_least,
        batch=batch,
        rounds=rounds,
        seconds=seconds,
        steps=steps,
        launcher=launcher,
        recovery=False,
    )
    session = Session(
        plugins if plugins is not None else default_plugins(),
        os.environ if environ is None else environ,
        Path(cwd or os.getcwd()).absolute(),
    )
    record = measure(arguments, session)
    for line in report(record):
        print(line)
    if not record["ok"]:
        last = record["workers"][-1]
        failed = last["failed"]
        reached = f"reach {last['efficiency']:.0%} efficiency" if failed is None else f"failed: {failed}"
        raise RunFailedError(
            f"{counted(last['workers'], 'worker')} {reached}, and {at_least:.0%} is required",
            where=os.fspath(job),
            why=f"{last['communication']:.0%} of a step is communication" if last.get("communication") else None,
            fix="a larger batch for each worker, gradient accumulation, or gradients in bf16; "
            "`fairlead bench comm` shows the network",
        )
    return record


def measure(arguments: argparse.Namespace, session: Session) -> dict[str, Any]:
    """The record of all numbers of workers."""
    refuse_ranks(session, "scaling")
    workers: tuple[int, ...] = arguments.workers
    cpus = usable_cpus()
    launcher = arguments.launcher
    if launcher is not None and "{workers}" not in launcher:
        raise ConfigError(
            "the launcher does not get the number of ranks to start",
            where="--launcher",
            fix='--launcher "srun -n {workers}"',
        )
    threads = max(1, cpus.count // max(workers))
    loaded, resolution = load(arguments, session, Layout(workers[0], threads))
    job = loaded.job
    assert job is not None
    found = resolution.devices_found
    if launcher is None and resolution.accelerator.name != "cpu" and not found.unlimited and max(workers) > found.count:
        raise ConfigError(
            f"there are {found.count} devices on this machine",
            where=f"--workers {','.join(map(str, workers))}",
            why=found.evidence,
            fix='fewer workers; in an allocation of several nodes: --launcher "srun -n {workers}"',
        )
    batch = batch_of_processes(job, arguments.batch)
    rows = [new_row(Layout(number, threads), batch) for number in workers]
    trials = Trials(session, arguments.job, arguments.overrides, job, loaded.root, launcher)
    try:
        steps = measure_rows(rows, trials, batch, arguments, session)
        recovery = _recovery(rows[-1], trials, batch, session) if arguments.recovery else None
    finally:
        trials.close()
    return _record(rows, batch, steps, recovery, arguments)


def _recovery(row: Row, trials: Trials, batch: Batch, session: Session) -> float | None:
    """Seconds from the kill of a rank to the first step of the ranks that `--max-restarts` restarts."""
    with trials.folder() as folder:
        killed = {
            "class": "fairlead_diagnostics.bench.step_times:KilledOnce",
            "args": {"folder": str(folder), "step": _KILLED_AT},
        }
        settings: dict[str, Any] = {
            **trials.settings(row.layout, Steps(_KILLED_AT, _KILLED_AT), folder),
            **batch.settings(row),
            "trainer.callbacks": [killed],
            "trainer.enable_checkpointing": True,
            "trainer.checkpoint": {"every_n_steps": _KILLED_AT // 2},
            "run.resume": "auto",
        }
        try:
            trials.fit(settings, folder, row.layout.processes, "--max-restarts", "1")
        except TrialFailedError as error:
            session.warn(f"the recovery could not be measured: {error}")
            return None
        times = [folder / name for name in ("killed", "recovered")]
        if not all(file.exists() for file in times):
            session.warn(f"the recovery could not be measured: the job ends before its step {_KILLED_AT}")
            return None
        began, ended = (float(file.read_text()) for file in times)
        return ended - began


def _record(
    rows: Sequence[Row], batch: Batch, steps: int, recovery: float | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    base = rows[0]
    assert base.last is not None
    first = base.last.ranks[0]
    constant = "global" if batch.together is not None else "per_device"
    measured = [_of_workers(row, base) for row in rows]
    wanted = arguments.at_least
    reached = measured[-1].get("efficiency")
    return {
        "job": " ".join(arguments.job),
        "hardware": {
            "device": first["device"],
            "cpu": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "threads_of_a_worker": base.layout.threads,
            "launcher": arguments.launcher,
        },
        "model": {"class": first["model"], "parameters": first["parameters"]},
        "batch": {"constant": constant, "samples": batch.together if batch.together is not None else batch.size},
        "rounds": arguments.rounds,
        "steps": steps,
        "workers": measured,
        "loss": _losses(rows) if constant == "global" else None,
        "recovery_s": recovery,
        "at_least": wanted,
        "ok": wanted is None or (reached is not None and reached >= wanted),
    }


def _of_workers(row: Row, base: Row) -> dict[str, Any]:
    more = row.layout.processes / base.layout.processes
    known: dict[str, Any] = {"workers": row.layout.processes, "batch_size": row.batch_size, "failed": row.failed}
    if row.failed is not None or row.last is None:
        return known
    speed, low, high = row.against(base)
    first = row.last.ranks[0]
    epoch = first["epoch_batches"]  # of a rank
    samples = epoch * first["samples"] / first["batches"] * row.layout.processes if epoch is not None else None
    device = [one["device_memory"] for one in row.last.ranks if one["device_memory"] is not None]
    return known | {
        "hosts": sorted({one["host"] for one in row.last.ranks}),
        "samples_per_s": {"median": row.rate, "rounds": row.rates},
        "epoch_s": samples / row.rate if samples is not None else None,
        "speedup": {"median": speed, "low": low, "high": high},
        "efficiency": speed / more,
        "communication": row.share,
        "memory_bytes": row.memory,
        "device_memory_bytes": max(device, default=None),
    }


def _losses(rows: Sequence[Row]) -> dict[str, Any]:
    """The mean loss of all ranks by batch, for each number of workers, and the largest difference to the first."""
    curves = {
        row.layout.processes: [
            statistics.mean(at) for at in zip(*(one["losses"] for one in row.last.ranks), strict=False)
        ]
        for row in rows
        if row.failed is None and row.last is not None
    }
    base, *others = curves.values()
    apart = [abs(a - b) for curve in others for a, b in zip(base, curve, strict=False)]
    return {"curves": curves, "largest_difference": max(apart, default=None)}


def report(record: Mapping[str, Any]) -> Iterator[str]:
    """The record, in the layout of a table of benchmarks."""
    hardware, model, batch = record["hardware"], record["model"], record["batch"]
    base, most = record["workers"][0]["workers"], record["workers"][-1]["workers"]
    hosts: list[str] = next((one["hosts"] for one in reversed(record["workers"]) if "hosts" in one), [])
    size = batch["samples"] if batch["samples"] is not None else "as the job has it"
    strong = batch["constant"] == "global"
    rounds = f"{counted(record['rounds'], 'round')} of {counted(record['steps'], 'step')}"
    threads = counted(hardware["threads_of_a_worker"], "thread")
    yield f"Scaling of {record['job']}, {'strong' if strong else 'weak'}: {rounds}, median of the rounds"
    yield f"Hardware: {most}x {hardware['device']} on {counted(len(hosts), 'node')}, {threads} each"
    yield f"Model: {model['class']} ({_short(model['parameters'])} parameters)"
    yield f"Batch Size: {size} ({'total across all workers' if strong else 'of each worker'})"
    yield ""
    yield from aligned([_HEADS, *(_line(one) for one in record["workers"] if one["failed"] is None)])
    yield from (
        f"{counted(one['workers'], 'worker')} failed: {one['failed']}" for one in record["workers"] if one["failed"]
    )
    yield ""
    shares = [one["communication"] for one in record["workers"] if one.get("communication") is not None]
    if shares:
        yield f"Communication Overhead: {statistics.mean(shares):.1%} average"
    loss = record["loss"]
    if loss is not None and loss["largest_difference"] is not None:
        length, apart = min(map(len, loss["curves"].values())), loss["largest_difference"]
        yield f"Loss Curve: {length} batches, at most {apart:.2g} from that of {counted(base, 'worker')}"
    if record["recovery_s"] is not None:
        yield f"Fault Recovery: {record['recovery_s']:.3g} s from the kill of a rank to the next step"
    if record["at_least"] is not None:
        reached = "reached" if record["ok"] else "NOT reached"
        yield f"Efficiency of at least {record['at_least']:.0%}: {reached}"


_HEADS: Final = (
    "workers",
    "s/epoch",
    "samples/s",
    "speedup",
    "(lowest, highest)",
    "efficiency",
    "communication",
    "memory",
)


def _line(one: Mapping[str, Any]) -> tuple[str, ...]:
    speed = one["speedup"]
    return (
        str(one["workers"]),
        f"{one['epoch_s']:.3g}" if one["epoch_s"] is not None else "-",
        number(one["samples_per_s"]["median"]),
        f"{speed['median']:.2f}x",
        f"{speed['low']:.2f}, {speed['high']:.2f}",
        f"{one['efficiency']:.0%}",
        f"{one['communication']:.0%}" if one["communication"] is not None else "-",
        f"{one['memory_bytes'] / 2**30:.2f} GiB",
    )


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def _plot(record: Mapping[str, Any], file: Path) -> None:
    found = [one for one in record["workers"] if "speedup" in one]
    workers = [float(one["workers"]) for one in found]
    ideal = Line("ideal", workers, [number / workers[0] for number in workers], dashes=True)
    line = Line("measured", workers, [one["speedup"]["median"] for one in found])
    plot(file, [line, ideal], title=f"{record['job']}: {record['model']['class']}", x="workers", y="speed-up")
