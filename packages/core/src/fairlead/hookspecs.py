"""The whole plugin API: what a plugin may contribute, on one page.

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
        """Environments: who this rank is and who else is there, each value with its reason.

        Called for the chosen environment only. Without this hook `explain` cannot show the ranks.

        Raises:
            ConfigError: A variable that the launcher promises is absent or malformed.
        """
        raise NotImplementedError

    @hookspec
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """Environments: the scheduler's job that this process is in, or None.

        Asked of every installed environment, whichever is chosen: under `torchrun`, in a batch script and in a shell
        inside an allocation there is a job too. The run's name, its lock, its provenance and the threads of a rank
        come from it. A variable that the scheduler would not set so is left out; it is no error.
        """

    @hookspec
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """Environments: why the job of `fairlead_job` is to stop, as its scheduler says until `deadline`.

        The signal itself does not say: the same one comes at the time limit, before a preemption and when a person
        cancels the job. Asked on one rank only, in a thread, when the loop starts (how long may a stop take?) and while
        the others save; `deadline` is on `time.monotonic()`; `fairlead_runs.programs.ask` runs a command until then.
        Without this hook, or an answer, the reason is `unknown`; with little time left it counts as `time_limit`.
        """

    @hookspec
    def fairlead_over(self, environ: Mapping[str, str], job: str, host: str) -> str | None:
        """Environments: how the job with this `Job.id` has ended for good; None: it has not, or who knows.

        Asked at the start of a run that this job left locked on that host; one of another cluster may have its id.
        """

    @hookspec
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """Environments: what the job holds that this process, which its launcher did not start, leaves unused.

        Asked of all where a run would use one machine alone: a job script that runs `python train.py` on two nodes.
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
        """Any selected plugin: what would go wrong later, said now."""
        raise NotImplementedError

    @hookspec
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """Any selected plugin: what of it keeps a resumed run from ending with the same bits as an undisturbed one.

        Nothing, from a hook that is there, means that it keeps none. An accelerator, a strategy, a precision, a layer
        sync or a checkpoint IO without this hook is *not known* to `explain`, never exact.
        """
        raise NotImplementedError
