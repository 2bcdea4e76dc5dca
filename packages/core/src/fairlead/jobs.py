"""A job as requested: read from files or a Python object, overridden, validated, located."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from fairlead.composition import NotAJobError, Origins, compose
from fairlead.config import JobConfig
from fairlead.config.job import EXTENDS
from fairlead.errors import ConfigError, FairleadError, UserCodeError
from fairlead.findings import Finding
from fairlead.interpolation import escape, interpolate
from fairlead.overrides import apply_override, parse_override
from fairlead.plugins import PluginManager
from fairlead.user_code import CodeRoot, code_root, import_callable
from fairlead.validation import dotted, findings_of

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class LoadedJob:
    """A job, and where each of its settings was written.

    Without a `job`, `findings` has an error; without `origins`, a Python object was named, or no settings were read.
    `data` has the `overrides`, and the values of the environment `variables`, by setting.
    """

    job: JobConfig | None
    data: Any
    source: str
    root: CodeRoot
    findings: tuple[Finding, ...] = ()
    origins: Origins | None = None
    overrides: tuple[Place, ...] = ()
    variables: Mapping[Place, Sequence[str]] = dataclasses.field(default_factory=dict)

    def locate(self, path: Place) -> str:
        """Where a setting was written: `job.yaml:7, trainer.strategy`, or `--set trainer.strategy`."""
        name = dotted(path)
        if any(path[: len(override)] == override for override in self.overrides):
            return f"--set {name}"
        location = self.origins.location(path) if self.origins is not None else self.source
        return f"{location}, {name}" if name else location

    def reason(self, path: Place) -> str:
        """Why a setting is what it is: where it was written, and the environment variables in it."""
        used = dict.fromkeys(n for at, names in self.variables.items() if at[: len(path)] == path for n in names)
        return self.locate(path) + (f", from {', '.join(used)}" if used else "")

    def placed(self, finding: Finding) -> Finding:
        """The finding with the file and line added to the config path it names."""
        return dataclasses.replace(finding, where=self.location(finding.where)) if finding.where else finding

    def location(self, where: str) -> str:
        """A config path with its file and line added; any other location as it is.

        What stands behind the path stays: `trainer.strategy, precision`. A quoted key there is one of the mapping at
        the path, where it may contain dots: `trainer.strategy.plan, 'blocks.*.up'`.
        """
        first, *others = where.split(", ")
        if first.replace("[", ".").partition(".")[0] not in JobConfig.model_fields or ":" in first:
            return where
        parts = first.replace("[", ".").replace("]", "").split(".")
        path: Place = tuple(int(p) if p.isdecimal() else p for p in parts)
        if others and others[0][:1] in ("'", '"') and others[0][-1] == others[0][0]:
            path = (*path, others.pop(0)[1:-1])
        return ", ".join([self.reason(path), *others])


def load_job(
    source: str | Sequence[str],
    *,
    plugins: PluginManager,
    cwd: Path,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    recorded_code: Sequence[Path] = (),
) -> LoadedJob:
    """Reads YAML files, of which a later one replaces what those before it say; or `module:object`.

    The object is a `JobConfig` or a function that returns one. `environ` is what `${env:NAME}` reads.
    `recorded_code`: where a run has found its code, which only a `run.code` of the overrides replaces.
    `ConfigError`: nothing can be read. Mistakes in the content are findings of the result.
    """
    sources = [source] if isinstance(source, str) else list(source)
    parsed = [parse_override(text) for text in overrides]
    if any(path[0] == EXTENDS for path, _ in parsed):
        raise ConfigError(
            f"{EXTENDS} stands in a file, it cannot be set",
            where=f"--set {EXTENDS}",
            fix=f"name both files, the base first: fairlead explain base.yaml {sources[-1]}",
        )
    if (named := next((one for one in sources if _is_object(one, cwd)), None)) is not None:
        if len(sources) > 1:
            raise ConfigError(
                f"{named} is a complete job in Python, which cannot be combined with files",
                where=" ".join(sources),
                fix="change single settings with --set, or build the job in Python",
            )
        return _load_object(named, parsed, plugins, cwd, environ)
    shown = " ".join(sources)
    main = Path(cwd, sources[-1])
    try:
        data, origins = compose(sources, cwd, environ)
    except NotAJobError as error:
        root = code_root(main, code=None, cwd=cwd)
        return LoadedJob(None, None, shown, root, (Finding.of(error, "error", "wrong-type"),))
    paths = tuple(path for path, _ in parsed)
    root = code_root(main, code=None, cwd=cwd)
    loaded = LoadedJob(None, data, shown, root, origins=origins, overrides=paths)
    loaded = _with_settings(loaded, parsed, environ)
    if loaded.findings:
        return loaded
    run = loaded.data.get("run")
    code = _folders(run.get("code") if isinstance(run, dict) else None)
    base = cwd if ("run", "code") in paths else origins.file(("run", "code")).path.parent
    if recorded_code and ("run", "code") not in paths:
        code = [*map(str, recorded_code), str(cwd)]
    beside = [file.path for file in reversed(origins.files)]
    root = code_root(main, code=code, cwd=cwd, beside=beside, code_base=base)
    loaded = dataclasses.replace(loaded, root=root)
    name = "-".join(Path(one).stem for one in sources)
    return _validated(loaded, plugins, default_name=name)


def _with_settings(loaded: LoadedJob, parsed: Sequence[tuple[Place, Any]], environ: Mapping[str, str]) -> LoadedJob:
    """The job with its overrides, and then its variables, replaced; what is wrong with those are findings."""
    data: Any = loaded.data
    for path, value in parsed:
        data = apply_override(data, path, value)
    found = interpolate(data, environ)
    findings = [
        Finding(
            "error",
            "variable-missing" if mistake.missing else "wrong-value",
            mistake.what,
            where=loaded.locate(path),
            why=mistake.why,
            fix=mistake.fix,
        )
        for path, mistake in found.mistakes.items()
    ]
    return dataclasses.replace(loaded, data=found.data, variables=found.variables, findings=tuple(findings))


def _folders(code: Any) -> str | list[str] | None:
    """`run.code` as far as it can be one; what is none is a finding."""
    listed = isinstance(code, list) and bool(code) and all(isinstance(one, str) for one in code)
    return code if isinstance(code, str) or listed else None


def _validated(loaded: LoadedJob, plugins: PluginManager, *, default_name: str) -> LoadedJob:
    try:
        job = JobConfig.model_validate(loaded.data, context={"plugins": plugins})
    except ValidationError as error:
        found = findings_of(error, loaded.data, JobConfig, plugins, loaded.reason)
        return dataclasses.replace(loaded, findings=tuple(found))
    if job.run.name is None:
        job = job.model_copy(update={"run": job.run.model_copy(update={"name": default_name})})
    return dataclasses.replace(loaded, job=job)


def _is_object(source: str, cwd: Path) -> bool:
    module, colon, name = source.partition(":")
    dotted_module = all(part.isidentifier() for part in module.split("."))
    return bool(colon and name and dotted_module) and not Path(cwd, source).exists()


def _load_object(
    source: str,
    parsed: list[tuple[Place, Any]],
    plugins: PluginManager,
    cwd: Path,
    environ: Mapping[str, str],
) -> LoadedJob:
    """Imports `module:object`; this runs the user's code, as requested."""
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
    name = source.partition(":")[2].replace(".", "-")
    return load_config(made, source, plugins, cwd, environ, parsed, default_name=name)


def load_config(
    job: JobConfig,
    source: str,
    plugins: PluginManager,
    cwd: Path,
    environ: Mapping[str, str],
    parsed: Sequence[tuple[Place, Any]] = (),
    *,
    default_name: str,
) -> LoadedJob:
    """A job that is an object, as if it had been read from `source`; `parsed` are its overrides.

    Only in these are variables replaced: Python has `os.environ`.
    """
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
    loaded = LoadedJob(None, escape(data), source, root, overrides=tuple(path for path, _ in parsed))
    loaded = _with_settings(loaded, parsed, environ)
    return loaded if loaded.findings else _validated(loaded, plugins, default_name=default_name)
