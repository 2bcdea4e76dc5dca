"""A job as it was asked for: read from a file or a Python object, overridden, validated, located."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from fairlead import yaml
from fairlead.config import JobConfig
from fairlead.errors import ConfigError, FairleadError, UserCodeError
from fairlead.findings import Finding
from fairlead.overrides import apply_override, parse_override
from fairlead.plugins import PluginManager
from fairlead.user_code import CodeRoot, code_root, import_callable
from fairlead.validation import dotted, findings_of


@dataclass(frozen=True)
class LoadedJob:
    """A job, and where each of its settings was written.

    Without a `job`, `findings` has an error; without a `path`, a Python object was named; `data` has the `overrides`.
    """

    job: JobConfig | None
    data: Any
    source: str
    path: Path | None
    root: CodeRoot
    findings: tuple[Finding, ...] = ()
    document: yaml.Document | None = None
    overrides: tuple[tuple[str | int, ...], ...] = ()

    def locate(self, path: tuple[str | int, ...]) -> str:
        """Where a setting was written: `job.yaml:7, trainer.strategy`, or `--set trainer.strategy`."""
        name = dotted(path)
        if any(path[: len(override)] == override for override in self.overrides):
            return f"--set {name}"
        line = self.document.line(path) if self.document is not None else None
        place = f"{self.source}:{line}" if line else self.source
        return f"{place}, {name}" if name else place

    def placed(self, finding: Finding) -> Finding:
        """The finding with the file and line added to the config path it names."""
        if not finding.where:
            return finding
        first, *others = finding.where.split(", ")
        if first.replace("[", ".").partition(".")[0] not in JobConfig.model_fields:
            return finding
        parts = first.replace("[", ".").replace("]", "").split(".")
        where = ", ".join([self.locate(tuple(int(p) if p.isdecimal() else p for p in parts)), *others])
        return dataclasses.replace(finding, where=where)


def load_job(source: str, *, plugins: PluginManager, cwd: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Reads a YAML file, or `module:object` naming a `JobConfig` or a function that returns one.

    `ConfigError`: nothing can be read. Mistakes in the content are findings of the result.
    """
    parsed = [parse_override(text) for text in overrides]
    if _is_object(source, cwd):
        return _load_object(source, parsed, plugins, cwd)
    path = Path(cwd, source)
    document = dataclasses.replace(yaml.load_file(path), source=source)
    if not isinstance(document.data, dict):
        kind = "empty" if document.data is None else f"a {type(document.data).__name__}"
        found = Finding(
            "error",
            "wrong-type",
            f"{source} is {kind}, not a job",
            where=f"{source}:1",
            fix="a job is a mapping with `model`, `data` and `trainer`",
        )
        root = code_root(path, code=None, cwd=cwd)
        return LoadedJob(None, document.data, source, path, root, (found,), document)
    data: Any = document.data
    for place, value in parsed:
        data = apply_override(data, place, value)
    run = data.get("run")
    code = run.get("code") if isinstance(run, dict) else None
    root = code_root(path, code=_folders(code), cwd=cwd)
    loaded = LoadedJob(None, data, source, path, root, document=document, overrides=tuple(place for place, _ in parsed))
    return _validated(loaded, plugins, default_name=path.stem)


def _folders(code: Any) -> str | list[str] | None:
    """`run.code` as far as it can be one; what is none is a finding."""
    listed = isinstance(code, list) and bool(code) and all(isinstance(one, str) for one in code)
    return code if isinstance(code, str) or listed else None


def _validated(loaded: LoadedJob, plugins: PluginManager, *, default_name: str) -> LoadedJob:
    try:
        job = JobConfig.model_validate(loaded.data, context={"plugins": plugins})
    except ValidationError as error:
        found = findings_of(error, loaded.data, JobConfig, plugins, loaded.locate)
        return dataclasses.replace(loaded, findings=tuple(found))
    if job.run.name is None:
        job = job.model_copy(update={"run": job.run.model_copy(update={"name": default_name})})
    return dataclasses.replace(loaded, job=job)


def _is_object(source: str, cwd: Path) -> bool:
    module, colon, name = source.partition(":")
    dotted_module = all(part.isidentifier() for part in module.split("."))
    return bool(colon and name and dotted_module) and not Path(cwd, source).exists()


def _load_object(
    source: str, parsed: list[tuple[tuple[str | int, ...], Any]], plugins: PluginManager, cwd: Path
) -> LoadedJob:
    """Imports `module:object`; this runs the user's code, as the user asked."""
    root = code_root(None, code=None, cwd=cwd)
    try:
        made = import_callable(source, root)
    except FairleadError as error:
        error.where = error.where or source
        raise
    if callable(made) and not isinstance(made, (JobConfig, type)):
        try:
            made = made()
        except Exception as error:
            raise UserCodeError(
                f"{source} raised {type(error).__name__} when it was called without arguments",
                where=source,
                why=str(error),
                fix="a job function takes no arguments and returns a JobConfig",
            ) from error
    if not isinstance(made, JobConfig):
        raise ConfigError(
            f"{source} is a {type(made).__name__}, not a JobConfig",
            where=source,
            fix="name a JobConfig, or a function without arguments that returns one",
        )
    return load_config(made, source, plugins, cwd, parsed, default_name=source.partition(":")[2].replace(".", "-"))


def load_config(
    job: JobConfig,
    source: str,
    plugins: PluginManager,
    cwd: Path,
    parsed: Sequence[tuple[tuple[str | int, ...], Any]] = (),
    *,
    default_name: str,
) -> LoadedJob:
    """A job that is an object, as if it had been read from `source`; `parsed` are its overrides."""
    root = code_root(None, code=job.run.code, cwd=cwd)
    try:
        data = job.model_dump(mode="json")
    except PydanticSerializationError as error:
        raise ConfigError(
            f"{source} holds something that no job file can hold",
            where=source,
            why=str(error),
            fix="give numbers, text, lists and mappings; a {class:, args:} builds an object in the run",
        ) from error
    for place, value in parsed:
        data = apply_override(data, place, value)
    loaded = LoadedJob(None, data, source, None, root, overrides=tuple(place for place, _ in parsed))
    return _validated(loaded, plugins, default_name=default_name)
