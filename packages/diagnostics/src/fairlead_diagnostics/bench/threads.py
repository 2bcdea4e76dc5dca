"""`fairlead bench threads JOB`: one process with all CPUs against several with a share of them each."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.checks import check_job
from fairlead.cli.job import load_requested
from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.detect import choose_environment
from fairlead.errors import ConfigError, RunFailedError
from fairlead.findings import raise_errors
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead_diagnostics.bench.cpus import CPUs, usable_cpus
from fairlead_diagnostics.bench.layouts import Layout, Row, advise, layouts, number, table, words
from fairlead_diagnostics.bench.trials import (
    Steps,
    TrialFailedError,
    Trials,
    as_words,
    plugins_as_fields,
    trial_settings,
)
from fairlead_runs.batch_size import batch_of_job
from fairlead_runs.describe import counted

_PILOT: Final = Steps(warm_up=3, timed=5)
_MOST_STEPS: Final = 5000
_LEAST_STEPS: Final = 4


@dataclass(frozen=True)
class Batch:
    """What the layouts have alike: the samples of all their processes in a step (`together`), or those of each."""

    setting: str | None
    size: int | None
    together: int | None

    def of(self, layout: Layout) -> int | None:
        """The batch size of each process; None: the job says none."""
        return self.together // layout.processes if self.together is not None else self.size

    def settings(self, row: Row) -> dict[str, Any]:
        """What a trial of this row changes in the job."""
        return {self.setting: row.batch_size} if self.setting is not None and row.batch_size is not None else {}

    def describe(self) -> str:
        """What is compared."""
        if self.together is not None:
            return f"the same batch of {self.together} in all, divided among the processes ({self.setting})"
        size = f"batch of {self.size}" if self.size is not None else "batch"
        return f"the same {size} for each process: N of them train on N times as many samples in a step"


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Measures, prints a table and one line of advice."""
    cpus = usable_cpus()
    if cpus.count < 2:
        raise ConfigError(
            "there is one CPU here, and nothing to divide",
            where="fairlead bench threads",
            why=f"the number is {cpus.reason}",
            fix="ask for more, as srun --cpus-per-task=8 fairlead bench threads JOB",
        )
    refuse_ranks(session, "threads")
    loaded, resolution = load(arguments, session, Layout(1, cpus.count))
    if resolution.accelerator.name != "cpu":
        raise ConfigError(
            f"the job computes on {resolution.accelerator.name}, not on CPUs",
            where=loaded.locate(("trainer", "accelerator")),
            why=f"{resolution.accelerator.name} comes from {resolution.settings['accelerator'].reason}",
            fix="to measure it on the CPUs: --set trainer.accelerator=cpu",
        )
    job = loaded.job
    assert job is not None
    batch = batch_of_processes(job, arguments.batch)
    tried = layouts(cpus, arguments.processes)
    rows = [new_row(layout, batch) for layout in tried]
    if all(row.failed is not None for row in rows[2:]):
        raise ConfigError(
            "no number of processes can be tried",
            where="--processes" if arguments.processes else str(batch.setting),
            why="; ".join(f"{row.layout}: {row.failed}" for row in rows[2:]) or f"there are {cpus.count} CPUs",
            fix="--batch per_device, or other numbers for --processes",
        )
    trials = Trials(session, arguments.job, arguments.overrides, job, loaded.root)
    try:
        steps = measure_rows(rows, trials, batch, arguments, session)
    finally:
        trials.close()
    strategy = "ddp" if getattr(job.trainer.strategy, "name", None) == "single_device" else None
    divided = batch.together is not None and job.trainer.batch_size == "per_device"  # a global one is divided anyway
    advice = advise(rows, batch_setting=batch.setting if divided else None, strategy=strategy)
    if arguments.json:
        session.print_json(
            {
                "job": " ".join(arguments.job),
                "cpus": {**vars(cpus)},
                "compared": batch.describe(),
                "rounds": arguments.rounds,
                "steps": steps,
                "layouts": [_document(row, rows) for row in rows],
                "advice": {
                    "devices": advice.layout.processes,
                    "threads": advice.layout.threads,
                    "settings": dict(advice.settings),
                    "certain": advice.certain,
                    "text": advice.text,
                },
            }
        )
        return 0
    for line in (_head(arguments, cpus, steps), f"compared: {batch.describe()}", "", *table(rows), ""):
        session.print(line)
    session.print(f"advice: {advice.text}")
    return 0


def refuse_ranks(session: Session, what: str) -> None:
    """Raises in one of several tasks of a launcher: each would measure while the others do."""
    chosen = choose_environment("auto", session.environ, session.plugins, starting=True)
    size = chosen.topology.world_size if chosen.topology is not None and chosen.topology.launched else None
    if size is not None and size.value > 1:
        raise ConfigError(
            f"fairlead bench {what} starts its processes itself",
            where=f"fairlead bench {what}",
            why=f"it was started {size.value} times ({size.reason}), and each would disturb the others",
            fix="start it as one task with all CPUs of a node: srun --ntasks=1 --cpus-per-task=8 ...",
        )


def load(arguments: argparse.Namespace, session: Session, layout: Layout) -> tuple[LoadedJob, Resolution]:
    """The job as it is written, once what a trial makes of it was checked, and what that is resolved to."""
    loaded = load_requested(arguments, session)
    if loaded.job is None:
        raise_errors(loaded.findings)
    job = loaded.job
    assert job is not None
    arguments.overrides = [*arguments.overrides, *as_words(plugins_as_fields(loaded))[1::2]]
    settings = trial_settings(job, layout, _PILOT, Path("bench"))
    words = [*arguments.overrides, *as_words(settings)[1::2]]
    changed = load_requested(arguments, session, words)
    checked = check_job(
        changed, environ=session.environ, plugins=session.plugins, purpose="check", cwd=session.cwd, uses_run=False
    )
    raise_errors(checked.findings)
    resolution = checked.resolution
    assert resolution is not None
    return loaded, resolution


def batch_of_processes(job: JobConfig, requested: str | None) -> Batch:
    """What stays constant: the global batch, if its setting is known and nothing else is requested."""
    setting, size = job.trainer.batch_size_from, batch_of_job(job)
    if size is None:
        if requested == "global":
            raise ConfigError(
                "the job does not say its batch size, so that it cannot be divided among processes",
                where="--batch global",
                why=f"{setting} is no number (trainer.batch_size_from)",
                fix="--batch per_device, or write the number there, or where it is into trainer.batch_size_from",
            )
        return Batch(None, None, None)
    devices = job.trainer.devices
    ranks = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) and devices > 0 else 1
    if job.trainer.batch_size == "global":  # of all ranks, and of all batches of a step
        size = max(1, size // (ranks * job.trainer.accumulate_grad_batches))
    if requested == "per_device":
        return Batch(setting, size, None)
    return Batch(setting, size, size * ranks)


def new_row(layout: Layout, batch: Batch) -> Row:
    """What will be measured of a layout; failed by now where the batch cannot be divided."""
    row = Row(layout, batch.of(layout))
    if batch.together is not None and batch.together % layout.processes:
        row.failed = f"a batch of {batch.together} cannot be divided by {layout.processes}"
    return row


def measure_rows(rows: list[Row], trials: Trials, batch: Batch, arguments: argparse.Namespace, session: Session) -> int:
    """Fills in the rows, in turns and each second time in the opposite order; returns the steps of a timing."""
    base = rows[0]
    try:
        pilot = trials.run(base.layout, _PILOT, batch.settings(base))
    except TrialFailedError as error:
        raise _nothing_to_compare(base.layout, arguments, str(error)) from None
    wanted: int = arguments.steps or min(_MOST_STEPS, round(arguments.seconds / pilot.step_s))
    steps = max(_LEAST_STEPS, wanted)
    took = f"a step takes {pilot.step_s * 1e3:.3g} ms in {words(base.layout)}"
    session.warn(f"{took}: {counted(steps, 'step')} are timed")
    for turn in range(arguments.rounds):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if row.failed is None:
                lines = _time(row, trials, _length(row.layout, base.layout, steps), batch.settings(row))
                session.warn(f"round {turn + 1} of {arguments.rounds}: {row.layout}: {lines}")
                if base.failed is not None:
                    raise _nothing_to_compare(base.layout, arguments, lines)
    return steps


def _nothing_to_compare(base: Layout, arguments: argparse.Namespace, why: str) -> RunFailedError:
    job = " ".join(arguments.job)
    launcher: str | None = getattr(arguments, "launcher", None)
    by = f"{launcher.format(workers=base.processes)} " if launcher is not None else ""
    devices = f" --set trainer.devices={base.processes}" if launcher is None else ""
    return RunFailedError(
        f"the training in {words(base)}, to which the others are compared, failed",
        where=job,
        why=why,
        fix=f"{by}fairlead fit {job}{devices} --set trainer.max_steps=2 shows it alone",
    )


def _length(layout: Layout, base: Layout, steps: int) -> Steps:
    """As many steps for all, but for a single thread, which takes longer for each."""
    if layout.processes * layout.threads == 1:
        steps = max(_LEAST_STEPS, steps // base.threads)
    return Steps(max(3, steps // 10), steps)


def _time(row: Row, trials: Trials, steps: Steps, settings: Mapping[str, Any]) -> str:
    """Adds one timing to a row, and says what came of it; what fails once is left out from then on."""
    try:
        found = trials.run(row.layout, steps, settings)
    except TrialFailedError as error:
        row.failed = error.short
        return f"failed: {error}"
    row.rates.append(found.rate)
    row.memory = found.memory
    row.last = found
    if found.communication is not None:
        row.communication.append(found.communication)
    return f"{number(found.rate)} samples/s"


def _head(arguments: argparse.Namespace, cpus: CPUs, steps: int) -> str:
    where = f", {counted(cpus.numa_nodes, 'NUMA node')}" if cpus.numa_nodes > 1 else ""
    turns = f"{counted(arguments.rounds, 'round')} of {counted(steps, 'step')}"
    return f"{' '.join(arguments.job)} on {cpus.count} CPUs{where}: {turns}, median of the rounds"


def _document(row: Row, rows: list[Row]) -> dict[str, Any]:
    base, single = rows[:2]
    known: dict[str, Any] = {
        "processes": row.layout.processes,
        "threads": row.layout.threads,
        "batch_size": row.batch_size,
        "failed": row.failed,
    }
    if row.failed is not None:
        return known
    speed, low, high = row.against(base)
    return known | {
        "samples_per_s": {"median": statistics.median(row.rates), "rounds": row.rates},
        "vs_one_process": {"median": speed, "low": low, "high": high},
        "efficiency": row.efficiency(single) if single.failed is None else None,
        "communication": row.share,
        "memory_bytes": row.memory,
    }
