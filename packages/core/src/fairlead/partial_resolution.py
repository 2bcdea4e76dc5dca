"""A resolution in the making: what has been decided, what was noticed, and how the next setting is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

from fairlead.config import ResourcesConfig, RunConfig, TrainerConfig
from fairlead.config_bases import BackendConfig
from fairlead.errors import FairleadError
from fairlead.facts import Devices, Setting
from fairlead.findings import Finding, Severity
from fairlead.hooks import answer
from fairlead.open_union import parse_backend
from fairlead.plugin_classes import AcceleratorPlugin
from fairlead.plugins import PluginManager

Purpose = Literal["check", "run"]
"""`check` looks at a job where it may not be meant to run; `run` is about to start it here."""

C = TypeVar("C", bound=BackendConfig)


@dataclass
class PartialResolution:
    """What has been decided so far, and from what; with a `profile`, for that hardware instead of this machine's."""

    trainer: TrainerConfig
    environ: Mapping[str, str]
    plugins: PluginManager
    run: RunConfig
    profile: ResourcesConfig | None
    purpose: Purpose
    settings: dict[str, Setting] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    probed: dict[str, Devices] = field(default_factory=dict)
    inside_job: bool = False

    def report(
        self, severity: Severity, code: str, what: str, *, where: str, why: str | None = None, fix: str | None = None
    ) -> None:
        """Adds a finding."""
        self.findings.append(Finding(severity, code, what, where=where, why=why, fix=fix))

    def hardware_severity(self) -> Severity:
        """Hardware that is not here is an error where the job is to run, and to be expected on a login node."""
        if self.purpose == "run" or self.profile is not None or self.inside_job:
            return "error"
        found = (plugin for plugin in self.accelerators().values() if plugin.priority > 0)
        return "error" if any(self.probe(plugin).count > 0 for plugin in found) else "info"

    def accelerators(self) -> dict[str, AcceleratorPlugin]:
        """The accelerators that can be loaded, by tag and by the names of presets."""
        return cast("dict[str, AcceleratorPlugin]", self.plugins.loaded("accelerator"))

    def default(self, axis: str, base: type[C], requested: C | str, tag: str, reason: str) -> C | None:
        """The config of an axis: as requested, else the plugin of a tag; an absent one is a finding."""
        if isinstance(requested, base):
            self.settings[axis] = Setting(self.plugins.label(requested), f"trainer.{axis}")
            return requested
        try:
            self.plugins.get(axis, tag, where=f"trainer.{axis}")
        except FairleadError as error:
            self.findings.append(Finding.of(error, "error", error.code or "plugin-missing", where=f"trainer.{axis}"))
            self.settings[axis] = Setting(tag, f"{reason}, but {error.what}")
            return None
        self.settings[axis] = Setting(tag, reason)
        return cast("C", parse_backend(axis, tag, self.plugins))

    def probe(self, plugin: AcceleratorPlugin) -> Devices:
        """The devices that a plugin sees; a probe that fails is a finding, and sees none."""
        if plugin.tag not in self.probed:
            try:
                seen = answer(self.plugins, plugin, "fairlead_devices", Devices, environ=self.environ)
                self.probed[plugin.tag] = seen or Devices(0, f"{plugin.tag} has no probe")
            except FairleadError as error:
                self.probed[plugin.tag] = Devices(0, error.what)
                selected = getattr(self.trainer.accelerator, "name", None) == plugin.tag
                severity: Severity = "error" if selected else "warning"
                self.findings.append(Finding.of(error, severity, "plugin-broken", where="trainer.accelerator"))
        return self.probed[plugin.tag]

    def mismatch(self, name: str, requested: int, launched: Setting, noun: str) -> None:
        """Reports a config that disagrees with the launcher."""
        self.report(
            "error",
            "launch-mismatch",
            f"trainer.{name} is {requested}, but the launcher started {launched.value} {noun}",
            where=f"trainer.{name}",
            why=f"{launched.value} comes from {launched.reason}",
            fix=f"write `{name}: auto`, or start the job with {requested}",
        )
