"""The core's own checks of every job: that of its user code, every class that it names with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fairlead.config import ClassSpec, JobConfig
from fairlead.findings import CheckResult, Finding, Severity
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import CheckPlugin
from fairlead.resolution import Resolution
from fairlead.user_code.check import check_spec
from fairlead.user_code.source import Sources
from fairlead.validation import dotted


def check_user_code(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """Modules, classes and arguments, by reading their sources; nothing is imported."""
    assert loaded.job is not None
    sources = Sources(loaded.root)
    findings: list[Finding] = []
    for path, spec in _class_specs(loaded.job):
        for problem in check_spec(spec.class_, spec.args, loaded.root, sources=sources):
            severity: Severity = "info" if problem.code == "class-unchecked" else "error"
            where = dotted((*path, *problem.path))
            findings.append(
                Finding(severity, problem.code, problem.what, where=where, why=problem.why, fix=problem.fix)
            )
    return CheckResult(tuple(findings))


def _class_specs(job: JobConfig) -> Iterator[tuple[tuple[str | int, ...], ClassSpec]]:
    yield ("model",), job.model
    if job.data is not None:
        yield ("data",), job.data
    for index, callback in enumerate(job.trainer.callbacks):
        yield ("trainer", "callbacks", index), callback
    if isinstance(job.trainer.profiler, ClassSpec):
        yield ("trainer", "profiler"), job.trainer.profiler


user_code = CheckPlugin("fairlead.own_checks:check_user_code")
