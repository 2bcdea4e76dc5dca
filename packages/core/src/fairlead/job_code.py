"""The check of a job's user code: every class that it names, with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fairlead.config import ClassSpec, JobConfig
from fairlead.findings import CheckResult, Finding, Severity
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead.user_code.check import check_spec
from fairlead.user_code.source import Sources
from fairlead.validation import dotted

__all__ = ["check_user_code"]

_PROBLEM_CODES: Final[Mapping[str, tuple[Severity, str]]] = {
    "module-not-found": ("error", "module-not-found"),
    "object-not-found": ("error", "class-not-found"),
    "not-callable": ("error", "class-not-callable"),
    "unknown-argument": ("error", "argument-unknown"),
    "missing-argument": ("error", "argument-missing"),
    "wrong-type": ("error", "wrong-type"),
    "syntax-error": ("error", "class-syntax"),
    "cannot-know": ("info", "class-unchecked"),
}


def check_user_code(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """Modules, classes and arguments, by reading their sources; nothing is imported."""
    return CheckResult(tuple(_findings(loaded)))


def _findings(loaded: LoadedJob) -> Iterator[Finding]:
    assert loaded.job is not None
    sources = Sources(loaded.root)
    for path, spec in _class_specs(loaded.job):
        for problem in check_spec(spec.class_, spec.args, loaded.root, sources=sources):
            severity, code = _PROBLEM_CODES[problem.kind]
            where = path + ("." if problem.path and isinstance(problem.path[0], str) else "") + dotted(problem.path)
            yield Finding(severity, code, problem.what, where=where, why=problem.why, fix=problem.fix)


def _class_specs(job: JobConfig) -> Iterator[tuple[str, ClassSpec]]:
    yield "model", job.model
    if job.data is not None:
        yield "data", job.data
    for index, callback in enumerate(job.trainer.callbacks):
        yield f"trainer.callbacks[{index}]", callback
    if isinstance(job.trainer.profiler, ClassSpec):
        yield "trainer.profiler", job.trainer.profiler
