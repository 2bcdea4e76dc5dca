"""The kind of device and how many: what was requested, what is there, what a launcher has decided already."""

from __future__ import annotations

import os
import re

from fairlead.config import ResourcesConfig
from fairlead.config_bases import AcceleratorConfigBase
from fairlead.facts import Devices, Setting
from fairlead.partial_resolution import PartialResolution
from fairlead.plugin_classes import AcceleratorPlugin
from fairlead.topology import Topology


def choose_accelerator(
    partial: PartialResolution, only: str | None = None
) -> tuple[AcceleratorConfigBase | None, Devices]:
    """The kind of device, and which of them are here; `only`: the tag of the one that the strategy drives."""
    requested, nothing = partial.trainer.accelerator, Devices(0, "no accelerator is installed")
    if partial.profile is not None:
        return _profiled_accelerator(partial, partial.profile)
    tag, reason = "cpu", "no other device was found"
    named = isinstance(requested, AcceleratorConfigBase) or only is not None
    if not isinstance(requested, AcceleratorConfigBase) and only is not None:
        tag, reason = only, f"the strategy {getattr(partial.trainer.strategy, 'name', '')} drives no other"
    elif not isinstance(requested, AcceleratorConfigBase):
        by_tag = {plugin.tag: plugin for plugin in partial.accelerators().values()}
        for candidate in sorted(by_tag.values(), key=lambda plugin: -plugin.priority):
            seen = partial.probe(candidate)
            if candidate.priority > 0 and seen.count:
                tag, reason = candidate.tag, f"{seen.count} found by {seen.evidence}"
                break
    config = partial.default("accelerator", AcceleratorConfigBase, requested, tag, reason)
    if config is None:
        return None, nothing
    plugin = partial.plugins.of(config)
    assert isinstance(plugin, AcceleratorPlugin)
    found = partial.probe(plugin)
    if named and found.count == 0:
        here = [name for name, p in partial.accelerators().items() if not p.preset and partial.probe(p).count]
        partial.report(
            partial.hardware_severity(),
            "accelerator-unavailable",
            f"the accelerator {partial.settings['accelerator'].value!r} is not on this machine",
            where="trainer.accelerator" if isinstance(requested, AcceleratorConfigBase) else "trainer.strategy",
            why=f"{found.evidence}; available here: {', '.join(here) or 'none'}",
            fix=(
                "write `accelerator: auto`"
                if isinstance(requested, AcceleratorConfigBase)
                else "write `strategy: auto`"
            )
            + ", or run it where there is one; `check --for resources` is for that",
        )
    return config, found


def _profiled_accelerator(
    partial: PartialResolution, profile: ResourcesConfig
) -> tuple[AcceleratorConfigBase | None, Devices]:
    """The accelerator of `resources` rather than this machine's."""
    kind = (profile.device or "cpu").lower()
    drivers = (one.tag for one in partial.accelerators().values() if re.fullmatch(one.devices, kind))
    tag = next(drivers, "cuda")
    if kind in partial.plugins.names("accelerator"):
        tag = kind
    found = Devices(profile.devices_per_node, "resources.devices_per_node", (kind,) * profile.devices_per_node)
    requested = partial.trainer.accelerator
    config = partial.default("accelerator", AcceleratorConfigBase, requested, tag, f"resources.device={kind}")
    if isinstance(requested, AcceleratorConfigBase) and requested.name != partial.plugins.get("accelerator", tag).tag:
        partial.report(
            "error",
            "profile-mismatch",
            f"the job asks for the accelerator {requested.name!r}, its resources are {kind!r}",
            where="trainer.accelerator",
            fix=f"write `accelerator: {tag}` or `accelerator: auto`",
        )
    return config, found


def count_devices(
    partial: PartialResolution,
    accelerator: AcceleratorConfigBase | None,
    found: Devices,
    topology: Topology,
    *,
    one: bool = False,
) -> tuple[int, tuple[int, ...] | None]:
    """Ranks on this node, and the indices of their devices where the config lists them; `one`: no more than one."""
    requested = partial.trainer.devices
    explicit = None if requested in ("auto", -1) else len(requested) if isinstance(requested, list) else int(requested)
    indices = tuple(requested) if isinstance(requested, list) else None
    if topology.launched and topology.local_world_size is not None:
        launched = topology.local_world_size
        if explicit is not None and explicit != launched.value:
            partial.mismatch("devices", explicit, launched, "ranks on this node")
        partial.settings["devices"] = launched
        return int(launched.value), indices
    planned = topology.local_world_size
    if planned is not None and explicit in (None, planned.value):
        _enough(partial, int(planned.value), indices, accelerator, found)
        partial.settings["devices"] = planned
        return int(planned.value), indices
    if explicit is not None:
        if planned is not None:
            partial.report(
                "warning",
                "launch-mismatch",
                f"trainer.devices is {explicit}, but {planned.value} ranks are planned for this node",
                where="trainer.devices",
                why=f"{planned.value} comes from {planned.reason}; the {explicit} of the job count",
                fix="write `devices: auto`, or make the two agree",
            )
        _enough(partial, explicit, indices, accelerator, found)
        partial.settings["devices"] = Setting(explicit, "trainer.devices")
        return explicit, indices
    count, reason = max(found.count, 1), found.evidence
    if found.unlimited:
        count, reason = 1, "one process uses all cores through threads"
    elif one and partial.trainer.devices == "auto":
        count, reason = 1, f"the strategy {getattr(partial.trainer.strategy, 'name', '')} trains one rank"
    partial.settings["devices"] = Setting(count, reason)
    return count, None


def _enough(
    partial: PartialResolution,
    explicit: int,
    indices: tuple[int, ...] | None,
    accelerator: AcceleratorConfigBase | None,
    found: Devices,
) -> None:
    """Compares the request with what is there."""
    if accelerator is None:
        return  # that it is not installed is a finding already
    cores = os.cpu_count() or 1
    if found.unlimited:
        if explicit > cores:
            meant = isinstance(partial.trainer.accelerator, AcceleratorConfigBase)
            partial.report(
                "warning" if meant else partial.hardware_severity(),
                "oversubscribed" if meant else "devices-count",
                f"{explicit} ranks were requested; this machine has no accelerator, and {cores} cores",
                where="trainer.devices",
                why="each rank is a process on the CPU, and they will take turns",
                fix=f"write `devices: {cores}`"
                + ("" if meant else f", or `accelerator: cpu` if you mean {explicit} processes"),
            )
        return
    wrong = [i for i in indices or () if i >= found.count]
    if (wrong or explicit > found.count) and (found.count or partial.trainer.accelerator == "auto"):
        are = "is" if found.count == 1 else "are"
        requested = f"the indices {wrong}" if wrong else f"{explicit} devices"
        valid = {0: "none", 1: "index 0"}.get(found.count, f"indices 0 to {found.count - 1}")
        partial.report(
            partial.hardware_severity(),
            "profile-mismatch" if partial.profile else "devices-count",
            f"{requested} were requested, but there {are} {found.count} of the kind {accelerator.name!r}",
            where="trainer.devices",
            why=f"found by {found.evidence}" + (f": {', '.join(found.names)}" if found.names else ""),
            fix=f"write `devices: {found.count}` or `auto` ({valid})" if found.count else "write `devices: auto`",
        )
