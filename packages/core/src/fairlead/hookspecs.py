"""The plugin API: what a plugin may contribute, on one page.

A plugin is one object, named `<axis>.<tag>` by one entry point in the group `fairlead`: an instance of that axis's
class in `fairlead.plugin_classes`, whose attributes name the config and the runtime. The hooks below are optional
and add detection and checks. Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fairlead.capabilities import Capability, InstalledPlugins
    from fairlead.config_bases import EnvironmentConfigBase
    from fairlead.facts import Claim, Devices, Job, StopReason, Unused
    from fairlead.findings import Finding, Inexact
    from fairlead.resolution import Resolution
    from fairlead.topology import Topology

__all__ = ["HookSpecs", "hookimpl"]

hookspec = pluggy.HookspecMarker("fairlead")
hookimpl = pluggy.HookimplMarker("fairlead")
"""Marks a method of a plugin as the implementation of a hook below."""


class HookSpecs:
    """All hooks. Each is optional; each result is checked, and a wrong one names its plugin."""

    @hookspec
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Environments: claim this process, with the evidence, or return None.

        All claims are collected; the most specific one wins (`Specificity`), a tie is a finding.
        Must not import anything heavy, start anything, or call MPI_Init.
        """

    @hookspec
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """Environments: this rank's identity and the other ranks, each value with its reason.

        Called for the chosen environment only. Without this hook `explain` cannot show the ranks.

        Raises:
            ConfigError: A variable that the launcher promises is absent or malformed.
        """
        raise NotImplementedError

    @hookspec
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """Environments: the scheduler's job that this process is in, or None.

        Called for every installed environment, not only the chosen one: under `torchrun`, in a batch script and in a
        shell inside an allocation there is a job too. The run's name, its lock, its provenance and the threads of a
        rank come from it. Leave out malformed variables instead of raising an error.
        """

    @hookspec
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """Environments: why the scheduler stops the job of `fairlead_job`; return before `deadline`.

        The signal is the same at the time limit, before a preemption and on a cancel. Called on one rank only, in a
        thread, when the loop starts (how long may a stop take?) and while the others save; `deadline` is on
        `time.monotonic()`; `fairlead_runs.programs.ask` runs a command until then. Without this hook, or an answer, the
        reason is `unknown`; with little time left it counts as `time_limit`.
        """

    @hookspec
    def fairlead_over(self, environ: Mapping[str, str], job: str, host: str) -> str | None:
        """Environments: how the job with this `Job.id` has ended for good; None if it has not, or if that is unknown.

        Called at the start of a run that this job left locked on that host; a job of another cluster may have the same
        id.
        """

    @hookspec
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """Environments: the resources of the job that this process leaves unused because no launcher started it.

        Called for all environments if a run would use only one machine, as in a job script that runs `python train.py`
        on two nodes.
        """

    @hookspec
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """Accelerators: which devices this machine has, found without importing torch."""
        raise NotImplementedError

    @hookspec
    def fairlead_capabilities(self, plugins: InstalledPlugins) -> Iterable[Capability]:
        """Any plugin: rows for the capability table, each with its reason.

        A row about a property, such as `StrategyPlugin.sharded_state`, is made for those of the installed plugins
        that have it, so that it holds for a third party's too: `plugins.distinct("strategy")`.
        """
        raise NotImplementedError

    @hookspec
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Any selected plugin: findings about what would fail later."""
        raise NotImplementedError

    @hookspec
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """Any selected plugin: the reasons why a resumed run may end with other bits than an undisturbed one.

        A hook that yields nothing declares the plugin exact. An accelerator, a strategy, a precision, a layer sync or a
        checkpoint IO without this hook is *not known* to `explain`, never exact.
        """
        raise NotImplementedError
