"""The core's own checks of every job: that of its user code, every class that it names with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fairlead.config import ClassSpec, JobConfig
from fairlead.errors import did_you_mean
from fairlead.findings import CheckResult, Finding, Severity
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import CheckPlugin
from fairlead.resolution import Resolution
from fairlead.user_code.check import check_spec
from fairlead.user_code.lookup import lacks_method
from fairlead.user_code.source import Sources
from fairlead.validation import dotted

_LOADER: Final = "train_dataloader"
_EXAMPLE: Final = "`data: {class: my_module:MyData}`"


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


def check_training_data(
    loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path
) -> CheckResult:
    """A job needs data to train on: its data module's, or the model's own `train_dataloader`."""
    assert loaded.job is not None
    job, sources = loaded.job, Sources(loaded.root)
    names: list[str] = []
    for spec in [job.model, *([job.data] if job.data is not None else [])]:
        found = lacks_method(spec.class_, _LOADER, sources)
        if found is None:
            return CheckResult()
        names += found
    model, data = job.model.class_.rpartition(":")[2], job.data.class_.rpartition(":")[2] if job.data else None
    what = f"{data} does not define {_LOADER}()" if data else "the job names no data"
    why = f"training needs it, as {model} does not define {_LOADER}()"
    fix = f"define {_LOADER}() in {data}" if data else "add the class of a LightningDataModule: " + _EXAMPLE
    near = did_you_mean(_LOADER, names)
    fix = f"did you mean {_LOADER} where you wrote {near}? Else {fix}" if near else fix
    return CheckResult((Finding("error", "data-missing", what, where="data", why=why, fix=fix),))


user_code = CheckPlugin("fairlead.own_checks:check_user_code")
training_data = CheckPlugin(
    "fairlead.own_checks:check_training_data",
    reads_run=True,  # for a training only
    codes={"data-missing": "The job names no data, and its model has no `train_dataloader`."},
)
