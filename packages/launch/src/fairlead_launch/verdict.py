"""How a run on this machine ended, from how its ranks ended: what is shown, the history, the exit code."""

from __future__ import annotations

import itertools
import signal
import site
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from fairlead.errors import RunDirectoryError, RunFailedError
from fairlead_launch.output import Output
from fairlead_launch.processes import Process
from fairlead_launch.reports import Announcement, Report
from fairlead_runs import History, read_history
from fairlead_runs.describe import shown_path
from fairlead_runs.exit_codes import ExitCode

SAVED: Final = int(ExitCode.AGAIN)
"""The exit code of what was stopped with everything saved, and wants another start."""
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
_STOPPED_AS_ASKED = {ExitCode.DONE, SAVED, ExitCode.STOPPED, ExitCode.INTERRUPTED} | {-number for number in _STOPS}


class OtherNodeError(RunFailedError):
    """The ranks of this node are down because those of another one have failed, which says why."""


@dataclass
class Rank:
    """A process that the supervisor has started, and what is known of it.

    It says how it fails on the pipe `reports`, of which `unread` is half a message; `ended` is in seconds since 1970;
    `joining`: it has come to the process group; `stopped_by_us`: it still ran when the run was given up.
    """

    rank: int
    process: Process
    reports: int
    unread: bytearray = field(default_factory=bytearray)
    ended: float | None = None
    report: Report | None = None
    announced: Announcement | None = None
    joining: bool = False
    stopped_by_us: bool = False

    @property
    def code(self) -> int:
        """The exit code, once it has ended; negative: the signal that killed it."""
        code = self.process.returncode
        assert code is not None
        return code


def stopped_as_requested(code: int, report: Report | None) -> bool:
    """Whether a rank has stopped as requested; a requeuer may have an exit code of its own."""
    return code in _STOPPED_AS_ASKED or (report is not None and not report.text)


def verdict(ranks: Sequence[Rank], stop: int | None, stderr: IO[str], output: Output, world: int) -> int:
    """The exit code of the job of `world` ranks, these being here; `stop` is the first signal that requested one.

    Where a rank died, the `RunFailedError` names it, with its own traceback first.
    """
    if all(rank.code == 0 for rank in ranks):
        return 0
    if all(rank.code in (0, SAVED) for rank in ranks):
        return SAVED
    # One that hangs is killed by us: the others have stopped without it, or a person has pressed Ctrl-C twice.
    hung = [rank for rank in ranks if rank.stopped_by_us and rank.code == -signal.SIGKILL]
    signalled = [rank for rank in ranks if rank not in hung]
    if (
        stop is not None
        and (signalled or stop == signal.SIGINT)
        and all(stopped_as_requested(r.code, r.report) for r in signalled)
    ):
        reports = [rank.report for rank in ranks if rank.report is not None]
        cause = next((report.text for report in reports), _default_text(ranks, stop))
        if cause:
            print(cause, file=stderr, flush=True)
        return max(
            [*(report.exit_code for report in reports), *(r.code for r in signalled if r.code > 0)] or [128 + stop]
        )
    first = min((rank for rank in ranks if rank.code != 0), key=_order)
    if first.report is not None and first.report.exit_code != 1:
        if first.report.text:
            print(_of_all_or_one(first.report, ranks, world), file=stderr, flush=True)
        return first.report.exit_code
    if first.report is not None and first.report.lost_a_peer:
        left = min((rank for rank in ranks if rank.code == 0), key=lambda rank: rank.ended or 0.0, default=None)
        if left is None:
            raise _of_another_node(first, ranks)
        first = left
    _record(first, ranks)
    others = ", ".join(str(r.rank) for r in ranks if r is not first)
    where, log = f"process {first.process.pid}", output.path(first.rank)
    if log is not None:
        where += f"; its output is in {shown_path(log, Path.cwd())}"
    raise RunFailedError(
        f"rank {first.rank} of {world} {_how(first)}",
        where=where,
        why=_why(first, output),
        fix=f"the other ranks ({others}) were stopped; nothing runs any more" if others else None,
    )


def _default_text(ranks: Sequence[Rank], stop: int) -> str:
    """What to say of a stop of which no rank has."""
    name = signal.Signals(stop).name
    if any(rank.announced is not None for rank in ranks):
        return f"stopped by {name}; the run resumes from its newest complete checkpoint when you restart it"
    return f"stopped by {name} before it began; nothing was lost"


def _of_all_or_one(report: Report, ranks: Sequence[Rank], world: int) -> str:
    """The job, not a rank, is wrong or stopped: every rank says the same, and once is enough."""
    if all(r.report is not None and r.report.text == report.text for r in ranks):
        return report.text
    return f"{report.text}\n  rank:  {report.rank} of {world}"


def _of_another_node(lost: Rank, ranks: Sequence[Rank]) -> OtherNodeError:
    """All ranks here only lost a peer: it failed on another node, which says why."""
    failed = _recorded(ranks)
    cause = f"rank {failed.get('rank')} on {failed.get('host')}: {failed.get('error')}" if failed is not None else None
    return OtherNodeError(
        "a rank of another node failed first, and the ranks here lost it",
        where=f"rank {lost.rank}, process {lost.process.pid}",
        why=cause or "it exited without an error report: killed (out of memory?), or its node died",
        fix="read the output of that node",
    )


def _of_this_start(ranks: Sequence[Rank]) -> tuple[Path, int] | None:
    """Where the run's history is, and the number of this start; None: it ended before there was a run."""
    announced = next((r.announced for r in ranks if r.announced is not None), None)
    return None if announced is None else (Path(announced.run) / "history.jsonl", announced.start)


def _recorded(ranks: Sequence[Rank]) -> Mapping[str, object] | None:
    """The first failure of this start in the history."""
    this = _of_this_start(ranks)
    try:
        events = read_history(this[0]) if this is not None else []
    except RunDirectoryError:  # a full disk may be what the run failed of; what is shown to the user says more
        return None
    recorded = list(itertools.takewhile(lambda event: event["event"] != "start", reversed(events)))
    return next((event for event in reversed(recorded) if event["event"] == "failed"), None)


def _record(first: Rank, ranks: Sequence[Rank]) -> None:
    """Writes the failure into the history where no rank could: it was killed, or the interpreter went down."""
    this = _of_this_start(ranks)
    if this is None:
        return
    path, start = this
    try:
        if any(event["event"] == "start" and event.get("start", 0) > start for event in read_history(path)):
            return  # another start owns the run by now
        if _recorded(ranks) is None:
            text = first.report.text.splitlines()[-1] if first.report is not None else _how(first)
            History(path, rank=first.rank, start=start).append("failed", error=f"rank {first.rank} {text}"[:2000])
    except RunDirectoryError:
        return  # a full disk may be what the run failed of; what is shown to the user says more


def _last_words(lines: Sequence[str]) -> str | None:
    """What a crash in native code leaves: the end of the rank's output."""
    return "\n".join(_crash(lines) or lines[-20:]) or None


def _crash(lines: Sequence[str]) -> list[str]:
    """Python's own report of a crash, cut to the thread that crashed and frames outside installed packages."""
    heads = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not heads:
        return []
    report = list(lines[heads[-1] :])
    begin = next((i for i, line in enumerate(report) if line.startswith("Current thread")), None)
    if begin is None:
        return report[:20]
    frames = list(itertools.takewhile(str.strip, report[begin + 1 :]))
    libraries = (*site.getsitepackages(), sysconfig.get_path("stdlib"), "<")
    users = [frame for frame in frames if not frame.partition('"')[2].startswith(libraries)]
    return [report[0], "The innermost frames:", *(users[:8] or frames[:8])]


def _order(rank: Rank) -> tuple[int, float]:
    """Sorts the ranks by who failed first; one that only lost its peers, or that we stopped, comes last."""
    report = rank.report
    if report is not None and not report.lost_a_peer and report.exit_code not in _STOPPED_AS_ASKED:
        return (0, report.time)
    if rank.stopped_by_us:
        return (3, rank.ended or 0.0)
    if report is not None:
        return (2, report.time)
    return (0 if rank.code < 0 else 1, rank.ended or 0.0)


def _why(first: Rank, output: Output) -> str | None:
    if first.report is not None:
        return first.report.text
    words = _last_words(output.last_lines(first.rank))
    if first.code != 0:
        return words
    left = "its process ended by itself, without an exception: os._exit() or sys.exit() in its code or that of a"
    return f"{left} library?" + (f"\nIts last output:\n{words}" if words else "")


def _how(rank: Rank) -> str:
    if rank.code == 0:
        return "exited with code 0 before the end of the job, and the others lost it"
    if rank.stopped_by_us and rank.code == -signal.SIGKILL:
        return "did not end on request, and was killed"
    if rank.code < 0:
        known = any(-rank.code == one for one in signal.Signals)
        name = signal.Signals(-rank.code).name if known else f"signal {-rank.code}"
        hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return "failed" if rank.report is not None else f"ended with exit code {rank.code} and no report"
