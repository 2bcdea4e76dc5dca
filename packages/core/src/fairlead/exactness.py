"""Whether a resumed run ends with the same bits as an undisturbed one: exact, not exact, or not known; torch-free.

Loaders and state are not guessed at: a start writes down what it has seen of them (`record`), and `explain_exactness`
puts that and the settings together. `fairlead fit JOB --prove-resume` tries the job itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from fairlead.config import JobConfig, RunConfig
from fairlead.config.marks import inexact_settings
from fairlead.config_bases import BackendConfig
from fairlead.errors import FairleadError
from fairlead.findings import Finding, Inexact
from fairlead.hooks import answers
from fairlead.interfaces import Setting
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.user_code import CodeRoot, find_callable


def inexact_kernels(
    deterministic: object, benchmark: object, setting: Callable[[str, object], str]
) -> Iterator[Inexact]:
    """What kernels that are chosen like this keep from being exact; `setting` writes one as the user does."""
    if deterministic is not True:
        why = "sums on a GPU are added in a varying order, unless kernels are chosen that do not"
        if deterministic == "warn":
            why = "operations without a deterministic kernel only warn, and are computed in a varying order"
        yield Inexact(setting("deterministic", deterministic), why=why, fix=setting("deterministic", True))
    if benchmark:
        why = "cuDNN measures its kernels at every start, and may choose others that round in another way"
        yield Inexact(setting("benchmark", True), why=why, fix=setting("benchmark", False))


# What computes, and what keeps the state: without its word nothing is known.  A plugin of another axis may be silent.
_MUST_SPEAK: Final = ("accelerator", "strategy", "precision", "layer_sync", "checkpoint_io")
_OPTIONAL: Final = ("environment", "requeue")


def device_reasons(resolution: Resolution, plugins: PluginManager, run: RunConfig | None = None) -> list[Inexact]:
    """What in the settings keeps a resume from being exact, or may; plugins answer through `fairlead_exactness`."""
    reasons = [*inexact_settings(run or RunConfig(), "run"), *inexact_settings(resolution.trainer, "trainer")]
    for axis in (*_MUST_SPEAK, *_OPTIONAL):
        config: BackendConfig | None = getattr(resolution, axis)
        if config is not None:
            reasons += _backend(config, resolution, plugins)
        elif axis != "layer_sync":
            reasons.append(
                Inexact(
                    f"the {axis}",
                    why="it is not decided",
                    fix="fix the errors that `fairlead check` shows",
                    certain=False,
                )
            )
    for logger in resolution.loggers:
        reasons += _reasons_of(logger, resolution, plugins) or []
    return list(dict.fromkeys(reasons))


def _backend(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact]:
    """What a plugin says, and the one that it wraps."""
    reasons = _reasons_of(config, resolution, plugins)
    if reasons is None and config.axis in _MUST_SPEAK:
        reasons = [
            Inexact(
                f"the {config.axis} {plugins.label(config)!r}",
                why="its plugin does not say whether it resumes exactly",
                fix="ask its authors for the hook fairlead_exactness, or choose another",
                certain=False,
            )
        ]
    inner = getattr(config, "inner", None)
    wrapped = _backend(inner, resolution, plugins) if isinstance(inner, BackendConfig) else []
    return [*(reasons or []), *wrapped]


def _reasons_of(config: BackendConfig, resolution: Resolution, plugins: PluginManager) -> list[Inexact] | None:
    """What the hook of a plugin gives; None without one.  A hook that fails says nothing that can be relied on."""
    try:
        return answers(plugins, plugins.of(config), "fairlead_exactness", Inexact, resolution=resolution)
    except FairleadError as error:
        why = error.what + (f": {error.why}" if error.why else "")
    what = f"the {config.axis} {config.name!r}"
    return [Inexact(what, why=why, fix="report it to the plugin's authors, or choose another", certain=False)]


EXACTNESS_FILE: Final = "exactness.json"
TRIAL: Final = 0
"""The number under which `fast_dev_run` writes what it saw; it is no start of the run, and leaves nothing else."""

Verdict = Literal["exact", "not exact", "not known"]


def verdict(reasons: Iterable[Inexact]) -> Verdict:
    """What reasons against an exact resume amount to; without any, it is exact as far as `explain` says it goes."""
    certain = [reason.certain for reason in reasons]
    return "not exact" if any(certain) else "not known" if certain else "exact"


def sentence(reason: Inexact) -> str:
    """A reason as `explain` says it."""
    word = "not exact" if reason.certain else "not known"
    return f"{word}, because of {reason.what} ({reason.why}), do: {reason.fix}"


@dataclass(frozen=True)
class Recorded:
    """What a start has recorded; its number is `TRIAL` for a `fast_dev_run`.

    `written` is in seconds since 1970: code that is newer was not seen. `world_size` and `job` may not be recorded.
    """

    start: int
    seen: tuple[Inexact, ...]
    world_size: int | None
    written: float
    job: str | None = None

    @property
    def by(self) -> str:
        """Who saw it, as in a sentence."""
        return "fast_dev_run" if self.start == TRIAL else f"start {self.start}"


def job_digest(job: Mapping[str, Any]) -> str:
    """Names what decides which loaders and which state a start sees: model, data, callbacks, and whose samplers."""
    trainer = job.get("trainer") or {}
    named = [job.get("model"), job.get("data"), trainer.get("callbacks"), trainer.get("use_distributed_sampler")]
    return hashlib.sha256(json.dumps(_text_keys(named), sort_keys=True, default=str).encode()).hexdigest()


def _text_keys(value: Any) -> Any:
    """Nested data whose keys can be sorted: integers and texts cannot."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return list(map(_text_keys, value)) if isinstance(value, list | tuple) else value


def record(
    *, settings: Iterable[Inexact], seen: Iterable[Inexact], world_size: int, job: str | None = None
) -> dict[str, Any]:
    """The content of `exactness.json`: what `device_reasons` gave, and what was seen of loaders and state."""
    parts = {"settings": tuple(settings), "seen": tuple(seen)}
    reasons = [{**dataclasses.asdict(one), "about": about} for about, part in parts.items() for one in part]
    exact = verdict([*parts["settings"], *parts["seen"]]) == "exact"
    return {"exact": exact, "world_size": world_size, "job": job, "reasons": reasons}


def last_record(run: Path, job: str | None = None) -> Recorded | None:
    """The newest record in a run directory, None without one; a record that names another job does not count."""
    found = []
    for path in run.glob(f"starts/*/{EXACTNESS_FILE}"):
        name = path.parent.name
        one = _read(path, int(name)) if name.isascii() and name.isdecimal() else None
        if one is not None and (job is None or one.job in (None, job)):
            found.append(one)
    return max(found, key=lambda one: (one.written, one.start), default=None)


def _read(path: Path, number: int) -> Recorded | None:
    """None where a start was killed while it wrote, or another version wrote."""
    try:
        found = _File.model_validate_json(path.read_bytes(), strict=True)
        written = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if not found.reasons and not found.exact:
        return None
    seen = [one for one in found.reasons if one.about != "settings"]
    reasons = tuple(Inexact(one.what, why=one.why, fix=one.fix, certain=one.certain) for one in seen)
    return Recorded(number, reasons, found.world_size, written, found.job)


class _Reason(BaseModel):
    what: str
    why: str
    fix: str
    certain: bool = True
    about: str = "seen"


class _File(BaseModel):
    exact: bool
    reasons: list[_Reason]
    world_size: int | None = None
    job: str | None = None


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
                where=setting[0] if (setting := _SETTING.match(reason.what)) else "trainer",
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
        sentences = [f"resume: {sentence(reason)}" for reason in self.reasons]
        if self.seen is None:
            return [*sentences, f"resume: not known before the first start ({_TRY})"]
        return sentences or [f"resume: exact for {self._scope}"]

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


def _ranks(count: int | None) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _stale(seen: Recorded, job: JobConfig, resolution: Resolution, root: CodeRoot) -> Iterator[Inexact]:
    """Why the next start may see something else than the last one, or resume otherwise."""
    before, ranks = seen.world_size, resolution.world_size
    if before not in (None, ranks) and seen.start == TRIAL:
        why = f"{seen.by} saw the loaders of {_ranks(before)}"
        yield Inexact(_ranks(ranks), why=why, fix=f"start it again ({_TRY})", certain=False)
    elif before not in (None, ranks):
        yield Inexact(
            f"{_ranks(ranks)} after {before}",
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
