"""All checks of a job together: the resolution, the capability table, the plugins' own, and those of every job."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fairlead.capabilities import Capability, check_capabilities
from fairlead.config import JobConfig, ResourcesConfig, RunConfig, TrainerConfig
from fairlead.config_bases import AXES, BackendConfig
from fairlead.errors import FairleadError, PluginError
from fairlead.facts import Setting
from fairlead.findings import CheckResult, Finding, Severity
from fairlead.hooks import answers
from fairlead.jobs import LoadedJob
from fairlead.partial_resolution import Purpose
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution, resolve

_ORDER: Final[Mapping[Severity, int]] = {"error": 0, "warning": 1, "info": 2}


@dataclasses.dataclass(frozen=True)
class CheckedJob:
    """A job with all findings, errors first; without a `resolution` the job itself is not valid."""

    loaded: LoadedJob
    resolution: Resolution | None
    findings: tuple[Finding, ...]


def check_job(
    loaded: LoadedJob,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
    profile: str | None = None,
    purpose: Purpose = "check",
    cwd: Path | None = None,
    uses_run: bool = True,
) -> CheckedJob:
    """Everything that can be known of a job from its config, its sources and the environment.

    `cwd` is what the job's paths are relative to; `uses_run` is False for validate, test and predict.
    """
    job, cwd = loaded.job, cwd or Path.cwd()
    if job is None:
        return CheckedJob(loaded, None, loaded.findings)
    findings = list(loaded.findings)
    hardware, problem = _profile(job, profile)
    findings += [problem] if problem else []
    resolution, found = check_trainer(
        job.trainer, environ=environ, plugins=plugins, run=job.run, profile=hardware, purpose=purpose
    )
    findings += found
    # Of ranks that start together, one will hold the run directory while others still check.
    reads_run = uses_run and not (resolution.topology.launched and purpose == "run")
    for name in plugins.names("check"):
        result = _check(name, loaded, resolution, environ, plugins, cwd, reads_run=reads_run)
        resolution = dataclasses.replace(resolution, settings={**resolution.settings, **result.settings})
        findings += result.findings
    resolution = _with_reasons(resolution, loaded, job)
    placed = [loaded.placed(finding) for finding in findings]
    unique = sorted(dict.fromkeys(placed), key=lambda finding: _ORDER[finding.severity])
    return CheckedJob(loaded, dataclasses.replace(resolution, findings=tuple(unique)), tuple(unique))


def _check(
    name: str,
    loaded: LoadedJob,
    resolution: Resolution,
    environ: Mapping[str, str],
    plugins: PluginManager,
    cwd: Path,
    *,
    reads_run: bool,
) -> CheckResult:
    """What the check `check.<name>` found; one that fails is a warning, and stops no job."""
    try:
        plugin = plugins.check(name)
        if plugin.reads_run and not reads_run:
            return CheckResult()
        result = pkgutil.resolve_name(plugin.check)(loaded, resolution, environ, cwd)
        if not isinstance(result, CheckResult):
            raise PluginError(f"{plugin.check} gave a {type(result).__name__}, not a CheckResult")
        return result
    except FairleadError as error:
        failure = error
    except Exception as error:  # a third party's code
        what, why = f"the check {name!r} raised {type(error).__name__}", str(error) or None
        failure = PluginError(what, why=why, fix="report it to the plugin's authors")
    return CheckResult((Finding.of(failure, "warning", "plugin-broken", where=f"the plugin check.{name}"),))


def check_trainer(
    trainer: TrainerConfig,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
    run: RunConfig | None = None,
    profile: ResourcesConfig | None = None,
    purpose: Purpose = "check",
) -> tuple[Resolution, list[Finding]]:
    """Resolves a trainer's config and checks the decisions against each other."""
    resolution = resolve(trainer, environ=environ, plugins=plugins, run=run, profile=profile, purpose=purpose)
    return resolution, [*resolution.findings, *find_conflicts(resolution, environ, plugins)]


def find_conflicts(resolution: Resolution, environ: Mapping[str, str], plugins: PluginManager) -> list[Finding]:
    """Checks the decisions against each other: the capability table, and the selected plugins' own checks."""
    rows, findings = capability_table(plugins)
    findings += check_capabilities(rows, _choices(resolution, plugins))
    for config in _selected(resolution):
        try:
            plugin = plugins.of(config)
            answered = answers(plugins, plugin, "fairlead_check", Finding, resolution=resolution, environ=environ)
            findings += answered or []
        except FairleadError as error:
            where = error.where or f"trainer.{config.axis}"
            findings.append(Finding.of(error, "error", "plugin-broken", where=where))
    return findings


def capability_table(plugins: PluginManager) -> tuple[list[Capability], list[Finding]]:
    """The rows that the installed plugins contribute, and a warning for each plugin that failed to."""
    rows: list[Capability] = []
    failed: list[Finding] = []
    for axis in AXES:
        for name, plugin in plugins.distinct(axis).items():
            try:
                rows += answers(plugins, plugin, "fairlead_capabilities", Capability, plugins=plugins) or []
            except FairleadError as error:
                failed.append(Finding.of(error, "warning", "plugin-broken", where=f"the plugin {axis}.{name}"))
    return rows, failed


def _profile(job: JobConfig, name: str | None) -> tuple[ResourcesConfig | None, Finding | None]:
    if name is None:
        return None, None
    if name != "resources" or job.resources is None:
        what = f"there is no profile {name!r}" if name != "resources" else "the job has no `resources`"
        return None, Finding(
            "error",
            "profile-missing",
            what,
            where="--for",
            why="the one profile is `resources`, the job's own section",
            fix="add resources: {nodes: 4, devices_per_node: 8, device: h100} and write --for resources",
        )
    return job.resources, None


def _selected(resolution: Resolution) -> Iterator[BackendConfig]:
    configs = [*(getattr(resolution, axis, None) for axis in AXES if axis != "logger"), *resolution.loggers]
    # An incomplete resolution has gaps where a plugin is not installed; each is a finding already.
    yield from (config for config in configs if config is not None)


def _choices(resolution: Resolution, plugins: PluginManager) -> dict[str, str | None]:
    """Every choice under its tag and its preset's name, with the config path that made it."""
    chosen: dict[str, str | None] = {}
    trainer = resolution.trainer
    for config in _selected(resolution):
        path = f"trainer.{config.axis}" if getattr(trainer, config.axis, None) not in (None, "auto") else None
        chosen[f"{config.axis}.{config.name}"] = path
        chosen[f"{config.axis}.{plugins.label(config)}"] = path
        for name in sorted(config.model_fields_set):  # a backend that wraps another, as `inner`
            inner = getattr(config, name)
            if isinstance(inner, BackendConfig):
                chosen.setdefault(f"{inner.axis}.{inner.name}", f"trainer.{config.axis}.{name}")
    if trainer.gradient_clip_val:
        chosen[f"clipping.{trainer.gradient_clip_algorithm or 'norm'}"] = "trainer.gradient_clip_val"
    return chosen


def _with_reasons(resolution: Resolution, loaded: LoadedJob, job: JobConfig) -> Resolution:
    """Adds the plain settings of the job, each with the line that set it."""
    settings: dict[str, Setting] = dict(resolution.settings)
    requested = loaded.data if isinstance(loaded.data, dict) else {}
    for section, model in (("trainer", job.trainer), ("run", job.run)):
        written: Any = requested.get(section)
        written = written if isinstance(written, dict) else {}
        for name, value in model.model_dump(mode="json").items():
            reason = loaded.reason((section, name)) if name in written else "the default"
            key = name if section == "trainer" or name == "resume" else f"run.{name}"
            known = settings.get(key)
            if known is None:
                settings[key] = Setting(value, reason)
            elif known.reason == f"{section}.{name}":
                settings[key] = Setting(known.value, reason)
    return dataclasses.replace(resolution, settings=settings)
