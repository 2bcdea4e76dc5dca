"""Whether loaders can keep up: too many workers for a node's CPUs, none beside a GPU, memory that is not pinned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fairlead.config import JobConfig
from fairlead.facts import Setting
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead.threads import choose_threads

_PER_DEVICE: Final = 4
_A_FEW: Final = 4
"""So many processes do no harm, however few CPUs there are."""


@dataclass(frozen=True)
class Loading:
    """How the batches of a rank are loaded, as far as it is known, and where that is written."""

    num_workers: int | None
    pin_memory: bool | None
    where: str


def check_loaders(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """The check `check.loaders`: what the job's arguments say; the start looks at the loaders themselves."""
    assert loaded.job is not None
    section, spec = ("data", loaded.job.data) if loaded.job.data is not None else ("model", loaded.job.model)
    workers, pinned = spec.args.get("num_workers"), spec.args.get("pin_memory")
    loading = Loading(
        workers if isinstance(workers, int) else None,
        pinned if isinstance(pinned, bool) else None,
        f"{section}.args",
    )
    return CheckResult(tuple(loader_findings(loading, resolution, loaded.job)))


def loader_findings(loading: Loading, resolution: Resolution, job: JobConfig | None = None) -> Iterator[Finding]:
    """Findings about the training loader of each rank, on the hardware of a resolution."""
    device, workers, ranks = resolution.device_type, loading.num_workers, _ranks(resolution)
    cpus = _cpus(resolution, ranks, job)
    total = (workers or 0) * ranks
    if workers and cpus is not None and total > max(cpus.value * ranks, _A_FEW):
        on_node = cpus.value * ranks
        counted = f"{on_node} CPU{'s' if on_node > 1 else ''}"
        advice = max(1, min(_PER_DEVICE * ranks, on_node) // ranks)
        yield Finding(
            "warning",
            "workers-too-many",
            f"{total} workers would load data on each node, which has {counted} for them",
            where=loading.where,
            why=f"num_workers={workers} for each of {ranks} rank{'s' if ranks > 1 else ''}; {cpus.reason}",
            fix=f"num_workers={advice}: the ranks of a node share min({_PER_DEVICE} x {ranks}, {counted})",
        )
    if workers == 0 and device != "cpu":
        yield Finding(
            "info",
            "workers-none",
            f"the process that drives the {device} device loads its batches, too: num_workers=0",
            where=loading.where,
            why="the device waits while a batch is read and put together",
            fix=f"num_workers={_PER_DEVICE}, or what the CPUs of a rank allow"
            if cpus is None
            else f"num_workers={max(1, min(_PER_DEVICE, cpus.value))} ({cpus.reason})",
        )
    if loading.pin_memory is False and device == "cuda":
        yield Finding(
            "info",
            "memory-not-pinned",
            "batches are copied to the GPU from memory that is not pinned: pin_memory=False",
            where=loading.where,
            why="such a copy is slower, and the training waits for it",
            fix="DataLoader(..., pin_memory=True)",
        )


def _ranks(resolution: Resolution) -> int:
    """Ranks on this node."""
    launched = resolution.topology.local_world_size
    return max(1, int(launched.value) if launched is not None else resolution.devices)


def _cpus(resolution: Resolution, ranks: int, job: JobConfig | None) -> Setting | None:
    """The CPUs of a rank, where the job runs; None: that is another machine, and nothing says it."""
    found = resolution.devices_found
    profiled = "threads" not in resolution.settings
    submitted = job is not None and job.submit is not None and not resolution.inside_job
    if not profiled and not submitted and (found.unlimited or resolution.devices <= found.count):
        return choose_threads("auto", {}, ranks, job=resolution.job)
    given = job.resources.cpus_per_device if job is not None and job.resources is not None else None
    return Setting(given, "resources.cpus_per_device") if given is not None else None
