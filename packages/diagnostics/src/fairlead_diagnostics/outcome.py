"""What becomes of a verdict: the ranks are started, the job is requeued without the bad nodes, or it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fairlead.errors import FairleadError
from fairlead.interfaces import Requeuer
from fairlead_diagnostics.verdict import Verdict
from fairlead_runs import History, read_history
from fairlead_runs.exclusion import EXCLUDED, NOT_EXCLUDED, NodeExcluder, excluded_nodes
from fairlead_runs.exit_codes import ExitCode
from fairlead_runs.states import HISTORY_FILE

MOST: Final = 3
"""Nodes that a run may exclude by itself, unless set otherwise: more are hardly ever bad at once."""


@dataclass(frozen=True)
class Outcome:
    """What was done.

    Args:
        code: What all nodes end with: 0 fit, 75 requeued without the bad nodes, 1 unfit.
        lines: The same in sentences.
        excluded: The nodes that are excluded from the job.
    """

    code: int
    lines: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


def decide(
    verdict: Verdict,
    hosts: Mapping[int, str],
    run: Path | None,
    requeuer: Callable[[], Requeuer | None],
    *,
    most: int = MOST,
) -> Outcome:
    """Has the job requeued without the nodes that are bad, where that is of use and may be done.

    It is recorded before it is done: the requeue ends this process, too.

    Args:
        verdict: What the screen has found.
        hosts: The name of each node.
        run: The run directory, whose history has the exclusions; None: nothing is excluded.
        requeuer: Makes what restarts the job; None: nothing does.
        most: Nodes that the run may exclude by itself; 0: none.
    """
    if verdict.fit:
        return Outcome(0)
    bad = {hosts[node]: "; ".join(reasons) for node, reasons in verdict.bad.items()}
    if verdict.unclear:
        return _unfit("another node would not help", bad)
    if most == 0:
        return _unfit("excluding nodes is off", bad)
    if run is None:
        return _unfit("no run was named whose history could keep it", bad)
    unnamed = [host for host in bad if " " in host]
    if unnamed:
        return _unfit(f"the scheduler's name of {', '.join(unnamed)} is not known", bad)
    known = excluded_nodes(read_history(run / HISTORY_FILE))
    total = len({*known, *bad})
    if total > most:
        note = f"{', '.join(known)} excluded already; " if known else ""
        return _unfit(f"{note}with {', '.join(bad)} it would be {total}, and --max-excluded is {most}", bad)
    history = History(run / HISTORY_FILE)
    recorded = False
    try:
        made = requeuer()
        if made is None:
            return _unfit("nothing requeues this job (`trainer.requeue`)", bad)
        if not isinstance(made, NodeExcluder):
            return _unfit(f"the requeuer {made.config.name!r} cannot exclude nodes", bad)
        history.append(EXCLUDED, nodes=bad, job=made.job.id if made.job is not None else None)
        recorded = True
        done = made.requeue_without(list(bad))
    except FairleadError as error:
        if recorded:
            history.append(NOT_EXCLUDED, nodes=bad, error=error.what, why=error.why)
        return _unfit(f"{error.what}{f': {error.why}' if error.why else ''}", bad)
    used = f"{total} of {most} exclusions used"
    return Outcome(ExitCode.AGAIN, (f"requeued without {', '.join(bad)} ({used}): {done}",), tuple(bad))


def _unfit(why: str, bad: Mapping[str, str]) -> Outcome:
    lines = [f"nothing is excluded: {why}"]
    if bad:
        lines.append(f"by hand: exclude {','.join(bad)} (`submit.exclude`, `sbatch --exclude`), and submit again")
    return Outcome(ExitCode.FAILED, tuple(lines))
