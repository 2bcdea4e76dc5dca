"""The command by which SLURM is told that a job is not to get some nodes; tried with 22.05."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fairlead.errors import RunFailedError

Ask = Callable[..., str]
"""Runs a command, as words, and returns what it prints; RunFailedError: it gave no answer."""


def exclusion(job: str, nodes: Sequence[str], ask: Ask) -> tuple[str, ...]:
    """The command that excludes nodes from a job, besides those that its user has excluded: it replaces them.

    SLURM takes it of a pending job only; a job is that as soon as it is requeued, while its processes are being ended.

    Raises:
        RunFailedError: The job could not start without them, and would be pending for ever.
    """
    shown = ask("scontrol", "show", "job", "-o", job).partition(" UserId=")[2]
    found = re.findall(r"\s(NumNodes|Partition|ExcNodeList|ReqNodeList)=(\S*)", shown)
    fields = dict(reversed(found))  # the first of each: a comment, which may say anything, comes last
    before = fields.get("ExcNodeList", "").replace("(null)", "")
    partition, needed = fields.get("Partition", ""), re.match(r"\d+", fields.get("NumNodes", ""))
    named = set(_expanded(fields.get("ReqNodeList", ""), ask)) & set(nodes)
    there = set(ask("sinfo", "--noheader", f"--partition={partition}", "--Node", "--format=%N").split())
    left = there - set(nodes) - set(_expanded(before, ask))
    if named or needed is None or len(left) < int(needed[0]):
        few = (
            f"it needs {needed[0] if needed else 'some'} nodes, and the partition {partition} has {len(there)}, of "
            f"which {len(left)} would be left"
        )
        raise RunFailedError(
            f"the job is not requeued without {', '.join(nodes)}: it could not start",
            where=f"job {job}",
            why=f"the job asks for {', '.join(sorted(named))} by name" if named else few,
            fix="have the nodes repaired, ask for fewer, or submit to another partition",
        )
    names = ",".join([*([before] if before else []), *nodes])
    return ("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")


def _expanded(names: str, ask: Ask) -> list[str]:
    return ask("scontrol", "show", "hostnames", names).split() if names not in ("", "(null)") else []
