"""How many CPU threads each rank computes with: those of its node, divided by its ranks, unless the user says."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fairlead.facts import Job, Setting


def choose_threads(
    requested: int | str, environ: Mapping[str, str], ranks: int, *, job: Job | None = None, cpus: int | None = None
) -> Setting:
    """The threads of one rank, with the reason; `cpus` stands for what the system says this process may use.

    A task that its launcher binds to CPUs may use those only; where tasks are not bound, each sees all CPUs of the
    node, and they have to share.
    """
    if requested != "auto":
        return Setting(int(requested), "trainer.threads")
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # `8,2` is for nested regions
    if given.isdecimal() and int(given):
        return Setting(int(given), "OMP_NUM_THREADS")
    usable = cpus or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) or 1
    if job is not None and job.cpus_per_rank is not None:
        return Setting(min(job.cpus_per_rank.value, usable), job.cpus_per_rank.reason)
    on_node = job.cpus_on_node if job is not None else None
    allotted = on_node.value if on_node is not None else (cpus or os.cpu_count() or 1)
    count = max(1, min(usable, allotted // ranks))
    if ranks == 1 or count == usable:
        return Setting(count, f"{usable} {'CPU' if usable == 1 else 'CPUs'} for this rank")
    return Setting(count, f"{allotted} CPUs for {ranks} ranks on this node")
