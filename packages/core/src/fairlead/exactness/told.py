"""What `explain` says of exactness: the settings, and either what a start saw or what the sources say."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fairlead.config import JobConfig
from fairlead.errors import FairleadError
from fairlead.exactness.reasons import sentence, verdict
from fairlead.exactness.recorded import Recorded, last_record
from fairlead.exactness.settings import device_reasons
from fairlead.exactness.sources import Reading, source_reasons
from fairlead.findings import Finding, Inexact
from fairlead.interfaces import Job, Setting
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.user_code import CodeRoot
from fairlead_runs import fingerprint
from fairlead_runs.commit import newest_complete
from fairlead_runs.directory import stored_fingerprint
from fairlead_runs.resuming import run_directory

__all__ = ["Told", "exactness_of"]

_PLACE: Final = re.compile(r" in (\S+:\d+)$")
_SETTING: Final = re.compile(r"(trainer|run)(\.\w+)+")


@dataclass(frozen=True)
class Told:
    """The answer.

    Args:
        setting: The verdict, and what it rests on.
        reasons: Why, those that are certain first.
    """

    setting: Setting
    reasons: tuple[Inexact, ...]

    @property
    def findings(self) -> list[Finding]:
        """Each reason as a finding, for `explain --json`."""
        return [
            Finding(
                "info",
                "resume-not-exact" if reason.certain else "resume-exactness-unknown",
                f"a resume is {'not' if reason.certain else 'not known to be'} exact: {reason.what}",
                where=_where(reason.what),
                why=reason.why,
                fix=reason.fix,
            )
            for reason in self.reasons
        ]

    @property
    def lines(self) -> list[str]:
        """As people read it."""
        return [f"resume: {sentence(reason)}" for reason in self.reasons] or [
            f"resume: {self.setting.value} ({self.setting.reason})"
        ]


def exactness_of(
    job: JobConfig,
    resolution: Resolution,
    root: CodeRoot,
    plugins: PluginManager,
    cwd: Path,
) -> Told:
    """Whether this job would resume exactly.

    Args:
        job: The job.
        resolution: Every decision of the run.
        root: Where the user's code is found.
        plugins: The plugin manager.
        cwd: The working directory.
    """
    accelerator = resolution.accelerator.name if resolution.accelerator is not None else "cpu"
    reading = source_reasons(job, root, ranks=resolution.world_size, accelerator=accelerator)
    run = _run(job, resolution.job, cwd)
    seen = last_record(run) if run is not None else None
    if seen is not None and not _still_holds(seen, reading, resolution):
        seen = None
    reasons = [*device_reasons(resolution, plugins, job.run), *_other_ranks(run, resolution)]
    reasons += [*_of_loaders(seen, reading), *reading.code]
    ordered = sorted(dict.fromkeys(reasons), key=lambda reason: not reason.certain)
    return Told(Setting(verdict(ordered), _basis(ordered, seen, reading)), tuple(ordered))


def _of_loaders(seen: Recorded | None, reading: Reading) -> list[Inexact]:
    """What a start saw takes the place of what was read, but for generators, which it may have looked past."""
    if seen is None:
        return [*reading.loaders, *reading.held]
    passed = f"start {seen.start} did not find it in the data, but it may lie deeper"
    return [*seen.loaders, *(replace(one, why=passed, certain=False) for one in reading.held if one.certain)]


def _run(job: JobConfig, scheduled: Job | None, cwd: Path) -> Path | None:
    """The run directory, where it is this job's."""
    try:
        path = run_directory(job, scheduled, cwd)
        stored = stored_fingerprint(path)
    except FairleadError:
        return None  # `check_run` has said it
    asked = fingerprint(job.model_dump(mode="json"))
    return path if stored is not None and stored.digest == asked.digest else None


def _still_holds(seen: Recorded, reading: Reading, resolution: Resolution) -> bool:
    """Whether what a start saw is what the next one would see: the same code, as many ranks."""
    if seen.world_size not in (None, resolution.world_size):
        return False
    return all(path.stat().st_mtime <= seen.written for path in reading.files if path.exists())


def _other_ranks(run: Path | None, resolution: Resolution) -> list[Inexact]:
    newest = newest_complete(run / "checkpoints").checkpoint if run is not None else None
    before = newest.metadata.get("world_size") if newest is not None else None
    if not isinstance(before, int) or before == resolution.world_size:
        return []
    return [
        Inexact(
            f"{resolution.world_size} ranks after {before}",
            why="other numbers of ranks add in another order; the data go on exactly where they were",
            fix=f"go on with {before}, where it matters",
        )
    ]


def _basis(reasons: list[Inexact], seen: Recorded | None, reading: Reading) -> str:
    files = ", ".join(sorted({path.name for path in reading.files})[:4]) or "no source"
    basis = f"the loaders as start {seen.start} saw them, and" if seen is not None else "the settings, and"
    basis = f"{basis} what was read: {files}" + (", ..." if len({p.name for p in reading.files}) > 4 else "")
    if not reasons:
        return basis
    more = f"; {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{reasons[0].what} ({reasons[0].why}){more}"


def _where(what: str) -> str:
    """The place that a reason names: a setting, or a line of a file."""
    if found := _PLACE.search(what):
        return found[1]
    return found[0] if (found := _SETTING.match(what)) else "trainer"
