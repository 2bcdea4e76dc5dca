"""What `explain` says of exactness: the settings, and what the last start saw of loaders and state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.config import JobConfig
from fairlead.exactness.recorded import TRIAL, Recorded, Verdict, job_digest, last_record, sentence, verdict
from fairlead.exactness.settings import device_reasons
from fairlead.findings import Finding, Inexact
from fairlead.interfaces import Setting
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.user_code import CodeRoot, find_callable

_TRY: Final = "fit --set trainer.fast_dev_run=true is enough"
_SCOPE: Final = "settings, loaders and what is in the checkpoint"
_NOT_SEEN: Final = "a state of your own outside of it is not seen (fairlead fit JOB --prove-resume tries it)"
_SETTING: Final = re.compile(r"(trainer|run)(\.\w+)+")


@dataclass(frozen=True)
class Exactness:
    """Whether a job would resume exactly, what is certain first; `seen` is None before a first start."""

    reasons: tuple[Inexact, ...]
    seen: Recorded | None

    @property
    def verdict(self) -> Verdict:
        """Never `exact` before a start has seen the loaders."""
        known = verdict(self.reasons)
        return "not known" if known == "exact" and self.seen is None else known

    @property
    def setting(self) -> Setting:
        """The verdict with its scope, or with the first reason."""
        if not self.reasons:
            return Setting(self.verdict, f"before the first start ({_TRY})" if self.seen is None else self._scope)
        first = self.reasons[0]
        more = len(self.reasons) - 1 + (self.seen is None)
        return Setting(self.verdict, f"{first.what} ({first.why})" + (f"; {more} more" if more else ""))

    @property
    def findings(self) -> list[Finding]:
        """Each reason as a finding, for `explain --json`."""
        found = [
            Finding(
                "info",
                "resume-not-exact" if reason.certain else "resume-exactness-unknown",
                f"a resume is {'not' if reason.certain else 'not known to be'} exact: {reason.what}",
                where=place[0] if (place := _SETTING.match(reason.what)) else "trainer",
                why=reason.why,
                fix=reason.fix,
            )
            for reason in self.reasons
        ]
        if self.seen is None:
            found.append(
                Finding(
                    "info",
                    "resume-exactness-unknown",
                    "whether a resume is exact is not known before the first start",
                    where="data",
                    why="loaders and state are seen when they are built",
                    fix=f"fairlead {_TRY}",
                )
            )
        return found

    @property
    def lines(self) -> list[str]:
        """As people read it."""
        said = [f"resume: {sentence(reason)}" for reason in self.reasons]
        if self.seen is None:
            return [*said, f"resume: not known before the first start ({_TRY})"]
        return said or [f"resume: exact for {self._scope}"]

    @property
    def _scope(self) -> str:
        by = f", as {self.seen.by} saw them" if self.seen is not None else ""
        return f"{_SCOPE}{by}; {_NOT_SEEN}"


def explain_exactness(job: JobConfig, resolution: Resolution, root: CodeRoot, plugins: PluginManager) -> Exactness:
    """Whether this job would resume exactly, as far as its settings and the records in its `run_dir` tell."""
    reasons = device_reasons(resolution, plugins, job.run)
    run = resolution.settings.get("run_dir")
    seen = last_record(Path(run.value), job_digest(job.model_dump(mode="json"))) if run is not None else None
    if seen is not None:
        reasons += [*seen.seen, *_stale(seen, job, resolution, root)]
    return Exactness(tuple(sorted(dict.fromkeys(reasons), key=lambda reason: not reason.certain)), seen)


def _stale(seen: Recorded, job: JobConfig, resolution: Resolution, root: CodeRoot) -> Iterator[Inexact]:
    """Why the next start may see something else than the last one, or resume otherwise."""
    before, ranks = seen.world_size, resolution.world_size
    if before not in (None, ranks) and seen.start == TRIAL:
        why = f"{seen.by} saw the loaders of {before} ranks"
        yield Inexact(f"{ranks} ranks", why=why, fix=f"start it again ({_TRY})", certain=False)
    elif before not in (None, ranks):
        yield Inexact(
            f"{ranks} ranks after {before}",
            why="another number of ranks adds in another order; the data resume exactly where they were",
            fix=f"resume with {before}, where it matters",
        )
    newer = [file.name for file in _files(job, root) if file.stat().st_mtime > seen.written]
    if newer:
        why = f"it was changed after {seen.by} saw loaders and state"
        yield Inexact(", ".join(newer), why=why, fix=f"start it again ({_TRY})", certain=False)


def _files(job: JobConfig, root: CodeRoot) -> list[Path]:
    """The files in which the classes of the job are."""
    specs: list[Any] = [job.model, job.data, *job.trainer.callbacks]
    found = (find_callable(spec.class_, root) for spec in specs if spec is not None)
    files = (getattr(one, "file", None) for one in found)
    return sorted({file for file in files if file is not None and file.exists()})
