"""From a config and an environment to a decision on every setting, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeVar, cast

from fairlead.axes import AcceleratorPlugin, EnvironmentPlugin
from fairlead.bases import (
    AcceleratorConfigBase,
    BackendConfig,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
from fairlead.config import ResourcesConfig, RunConfig, TrainerConfig
from fairlead.detect import FALLBACK, ChosenEnvironment, choose_environment
from fairlead.errors import FairleadError, MissingDependencyError, PluginError
from fairlead.findings import Finding, Severity
from fairlead.interfaces import Devices, Setting, Topology
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution

__all__ = ["Purpose", "Resolution", "resolve"]

Purpose = Literal["check", "run"]
"""`check` looks at a job where it may not be meant to run; `run` is about to start it here."""

DEFAULT_PORT = 29500
C = TypeVar("C", bound=BackendConfig)


def resolve(
    trainer: TrainerConfig,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
    run: RunConfig | None = None,
    profile: ResourcesConfig | None = None,
    purpose: Purpose = "check",
) -> Resolution:
    """Decides every setting of a run.

    Args:
        trainer: The trainer's config.
        environ: The environment variables of the process.
        plugins: The plugin manager.
        run: For the setting `resume`.
        profile: Decide for this hardware instead of this machine's.
        purpose: `run` makes absent hardware and absent engines errors.
    """
    return _Resolver(trainer, environ, plugins, run or RunConfig(), profile, purpose).resolve()


class _Resolver:
    """One resolution in progress: the order of the methods is the order of the decisions."""

    def __init__(
        self,
        trainer: TrainerConfig,
        environ: Mapping[str, str],
        plugins: PluginManager,
        run: RunConfig,
        profile: ResourcesConfig | None,
        purpose: Purpose,
    ) -> None:
        self.trainer, self.environ, self.plugins = trainer, environ, plugins
        self.run, self.profile, self.purpose = run, profile, purpose
        self.settings: dict[str, Setting] = {}
        self.findings: list[Finding] = []
        self.probed: dict[str, Devices] = {}

    def resolve(self) -> Resolution:
        chosen = choose_environment(
            self.trainer.environment, self.environ, self.plugins, starting=self.purpose == "run"
        )
        self.findings += chosen.findings
        self.settings["environment"] = chosen.setting
        self.inside_job = chosen.inside_job and self.profile is None
        topology = chosen.topology or Topology(launched=False)
        if self.profile is not None:
            topology = Topology(launched=False)
        accelerator, found = self._accelerator()
        devices, indices = self._devices(accelerator, found, topology)
        num_nodes = self._num_nodes(topology)
        world_size = self._world_size(devices, num_nodes, topology)
        self._ranks(topology, chosen)
        self._main(topology, num_nodes)
        strategy = self._strategy(world_size, accelerator)
        precision = self._default("precision", PrecisionConfigBase, self.trainer.precision, "32-true", "the default")
        checkpoint_io = self._default(
            "checkpoint_io", CheckpointIOConfigBase, self.trainer.checkpoint_io, "torch", "the default"
        )
        requeue = self._requeue(chosen)
        self._optional()
        backend = self._backend(accelerator)
        self.settings["resume"] = Setting(self.run.resume, "run.resume" if self.run.resume != "auto" else "the default")
        self._engines()
        return Resolution(
            settings=self.settings,
            trainer=self.trainer,
            topology=topology,
            accelerator=cast("AcceleratorConfigBase", accelerator),
            strategy=cast("StrategyConfigBase", strategy),
            precision=cast("PrecisionConfigBase", precision),
            environment=cast("EnvironmentConfigBase", chosen.config),
            checkpoint_io=cast("CheckpointIOConfigBase", checkpoint_io),
            requeue=cast("RequeueConfigBase", requeue),
            layer_sync=self.trainer.layer_sync,
            loggers=self.trainer.loggers,
            num_nodes=num_nodes,
            devices=devices,
            device_indices=indices,
            world_size=world_size,
            backend=backend,
            devices_found=found,
            inside_job=self.inside_job,
            findings=tuple(self.findings),
        )

    # -- helpers

    def _report(self, severity: Severity, code: str, what: str, where: str, why: str | None, fix: str | None) -> None:
        self.findings.append(Finding(severity, code, what, where, why, fix))

    def _hardware_severity(self) -> Severity:
        """Hardware that is not here is an error where the job is to run, and to be expected on a login node."""
        if self.purpose == "run" or self.profile is not None or self.inside_job or self._has_device():
            return "error"
        return "info"

    def _has_device(self) -> bool:
        return any(
            plugin.priority > 0 and self._probe(plugin).count > 0
            for plugin in self.plugins.loaded("accelerator").values()
            if isinstance(plugin, AcceleratorPlugin)
        )

    def _default(self, axis: str, base: type[C], asked: C | str, tag: str, reason: str) -> C | None:
        """The config of an axis: as asked, else the plugin of a tag; an absent one is a finding."""
        if isinstance(asked, base):
            self.settings[axis] = Setting(self.plugins.label(asked), f"trainer.{axis}")
            return asked
        try:
            self.plugins.get(axis, tag, where=f"trainer.{axis}")
        except FairleadError as error:
            broken = isinstance(error, PluginError) and not isinstance(error, MissingDependencyError)
            code = "plugin-broken" if broken else "plugin-missing"
            self._report("error", code, error.what, f"trainer.{axis}", error.why, error.fix)
            self.settings[axis] = Setting(tag, f"{reason}, but {error.what}")
            return None
        self.settings[axis] = Setting(tag, reason)
        return cast("C", parse_backend(axis, tag, self.plugins))

    # -- decisions

    def _probe(self, plugin: AcceleratorPlugin) -> Devices:
        """The devices that a plugin sees; a probe that fails is a finding, and sees none."""
        if plugin.tag not in self.probed:
            try:
                self.probed[plugin.tag] = self._ask(plugin)
            except FairleadError as error:
                self.probed[plugin.tag] = Devices(0, error.what)
                selected = getattr(self.trainer.accelerator, "name", None) == plugin.tag
                self._report(
                    "error" if selected else "warning",
                    "plugin-broken",
                    error.what,
                    "trainer.accelerator",
                    error.why,
                    error.fix,
                )
        return self.probed[plugin.tag]

    def _ask(self, plugin: AcceleratorPlugin) -> Devices:
        for result in self.plugins.call(plugin, "fairlead_devices", environ=self.environ):
            if not isinstance(result, Devices):
                raise PluginError(
                    f"fairlead_devices of accelerator.{plugin.tag} returned a {type(result).__name__}, not a Devices"
                )
            return result
        return Devices(0, f"{plugin.tag} has no probe")

    def _accelerator(self) -> tuple[AcceleratorConfigBase | None, Devices]:
        asked, nothing = self.trainer.accelerator, Devices(0, "no accelerator is installed")
        if self.profile is not None:
            return self._profiled_accelerator(self.profile)
        tag, reason = "cpu", "no other device was found"
        if not isinstance(asked, AcceleratorConfigBase):
            known = self.plugins.loaded("accelerator")
            ranked = sorted(
                {p.tag: p for p in known.values() if isinstance(p, AcceleratorPlugin)}.values(),
                key=lambda p: -p.priority,
            )
            for candidate in ranked:
                seen = self._probe(candidate)
                if candidate.priority > 0 and seen.count:
                    tag, reason = candidate.tag, f"{seen.count} found by {seen.evidence}"
                    break
        config = self._default("accelerator", AcceleratorConfigBase, asked, tag, reason)
        if config is None:
            return None, nothing
        plugin = self.plugins.of(config)
        assert isinstance(plugin, AcceleratorPlugin)
        found = self._probe(plugin)
        if isinstance(asked, AcceleratorConfigBase) and found.count == 0:
            here = [
                name
                for name, p in self.plugins.loaded("accelerator").items()
                if isinstance(p, AcceleratorPlugin) and not p.preset and self._probe(p).count
            ]
            self._report(
                self._hardware_severity(),
                "accelerator-unavailable",
                f"the accelerator {self.settings['accelerator'].value!r} is not on this machine",
                "trainer.accelerator",
                f"{found.evidence}; available here: {', '.join(here) or 'none'}",
                "write `accelerator: auto`, or run it where there is one; `check --for resources` is for that",
            )
        return config, found

    def _profiled_accelerator(self, profile: ResourcesConfig) -> tuple[AcceleratorConfigBase | None, Devices]:
        """The accelerator of `resources` rather than this machine's."""
        kind = (profile.device or "cpu").lower()
        tag = (
            kind
            if kind in self.plugins.names("accelerator")
            else "xla"
            if kind.startswith(("tpu", "v5", "v6"))
            else "cuda"
        )
        found = Devices(profile.devices_per_node, "resources.devices_per_node", (kind,) * profile.devices_per_node)
        asked = self.trainer.accelerator
        config = self._default("accelerator", AcceleratorConfigBase, asked, tag, f"resources.device={kind}")
        if (
            config is not None
            and isinstance(asked, AcceleratorConfigBase)
            and config.name != self.plugins.get("accelerator", tag).tag
        ):
            self._report(
                "error",
                "profile-mismatch",
                f"the job asks for the accelerator {config.name!r}, its resources are {kind!r}",
                "trainer.accelerator",
                None,
                f"write `accelerator: {tag}` or `accelerator: auto`",
            )
        return config, found

    def _devices(
        self, accelerator: AcceleratorConfigBase | None, found: Devices, topology: Topology
    ) -> tuple[int, tuple[int, ...] | None]:
        asked = self.trainer.devices
        explicit = None if asked in ("auto", -1) else len(asked) if isinstance(asked, list) else int(asked)
        indices = tuple(asked) if isinstance(asked, list) else None
        if topology.launched and topology.local_world_size is not None:
            launched = topology.local_world_size
            if explicit is not None and explicit != launched.value:
                self._mismatch("devices", explicit, launched, "ranks on this node")
            self.settings["devices"] = launched
            return int(launched.value), indices
        if explicit is not None:
            self._enough(explicit, indices, accelerator, found)
            self.settings["devices"] = Setting(explicit, "trainer.devices")
            return explicit, indices
        if found.unlimited:
            self.settings["devices"] = Setting(1, "one process uses all cores through threads")
            return 1, None
        count = max(found.count, 1)
        self.settings["devices"] = Setting(count, found.evidence)
        return count, None

    def _enough(
        self, explicit: int, indices: tuple[int, ...] | None, accelerator: AcceleratorConfigBase | None, found: Devices
    ) -> None:
        """Compares what was asked for with what is there."""
        if accelerator is None:
            return  # that it is not installed is a finding already
        cores = os.cpu_count() or 1
        if found.unlimited:
            if explicit > cores:
                meant = isinstance(self.trainer.accelerator, AcceleratorConfigBase)
                self._report(
                    "warning" if meant else self._hardware_severity(),
                    "oversubscribed" if meant else "devices-count",
                    f"{explicit} ranks were asked for; this machine has no accelerator, and {cores} cores",
                    "trainer.devices",
                    "each rank is a process on the CPU, and they will take turns",
                    f"write `devices: {cores}`"
                    if meant
                    else f"write `devices: {cores}`, or `accelerator: cpu` if you mean {explicit} processes",
                )
            return
        wrong = [i for i in indices or () if i >= found.count]
        if (wrong or explicit > found.count) and (found.count or self.trainer.accelerator == "auto"):
            are = "is" if found.count == 1 else "are"
            asked = f"the indices {wrong}" if wrong else f"{explicit} devices"
            valid = {0: "none", 1: "index 0"}.get(found.count, f"indices 0 to {found.count - 1}")
            self._report(
                self._hardware_severity(),
                "profile-mismatch" if self.profile else "devices-count",
                f"{asked} were asked for, {found.count} of the kind {accelerator.name!r} {are} there",
                "trainer.devices",
                f"found by {found.evidence}" + (f": {', '.join(found.names)}" if found.names else ""),
                f"write `devices: {found.count}` or `auto` ({valid})" if found.count else "write `devices: auto`",
            )

    def _mismatch(self, name: str, asked: int, launched: Setting, noun: str) -> None:
        self._report(
            "error",
            "launch-mismatch",
            f"trainer.{name} is {asked}, but the launcher started {launched.value} {noun}",
            f"trainer.{name}",
            f"{launched.value} comes from {launched.reason}",
            f"write `{name}: auto`, or start the job with {asked}",
        )

    def _num_nodes(self, topology: Topology) -> int:
        asked, launched = self.trainer.num_nodes, topology.num_nodes
        if not self.trainer.auto_determine_num_nodes and asked == "auto":
            asked = 1
        if self.profile is not None:
            return self._profiled_nodes(asked, self.profile)
        if isinstance(asked, int):
            if launched is not None and launched.value != asked:
                self._mismatch("num_nodes", asked, launched, "nodes")
            elif launched is None and asked > 1 and self.settings["environment"].value == FALLBACK:
                self._report(
                    self._hardware_severity(),
                    "launch-mismatch",
                    f"trainer.num_nodes is {asked}, but nothing started ranks on other nodes",
                    "trainer.num_nodes",
                    f"the environment is {self.settings['environment'].value}: {self.settings['environment'].reason}",
                    "start it with srun, torchrun or mpirun on each node, or export MASTER_ADDR, NODE_RANK and NNODES",
                )
            path = "trainer.num_nodes" if self.trainer.num_nodes == asked else "trainer.auto_determine_num_nodes"
            self.settings["num_nodes"] = launched if launched is not None else Setting(asked, path)
        else:
            self.settings["num_nodes"] = launched or Setting(1, "one machine")
        return int(self.settings["num_nodes"].value)

    def _profiled_nodes(self, asked: int | str, profile: ResourcesConfig) -> int:
        """Nodes of `resources`; asking for fewer is fine."""
        if isinstance(asked, int) and asked > profile.nodes:
            self._report(
                "error",
                "profile-mismatch",
                f"the job asks for {asked} nodes, its resources have {profile.nodes}",
                "trainer.num_nodes",
                None,
                f"write `num_nodes: auto` or `resources.nodes: {asked}`",
            )
        known = (
            Setting(asked, "trainer.num_nodes") if isinstance(asked, int) else Setting(profile.nodes, "resources.nodes")
        )
        self.settings["num_nodes"] = known
        return int(known.value)

    def _world_size(self, devices: int, num_nodes: int, topology: Topology) -> int:
        if topology.launched and topology.world_size is not None:
            self.settings["world_size"] = topology.world_size
            return int(topology.world_size.value)
        self.settings["world_size"] = Setting(devices * num_nodes, f"{devices} devices x {num_nodes} nodes")
        return devices * num_nodes

    def _ranks(self, topology: Topology, chosen: ChosenEnvironment) -> None:
        elsewhere = chosen.topology is None and self.profile is None and not chosen.is_fallback
        reason = (
            f"here; {chosen.setting.value} says when it starts the ranks"
            if elsewhere
            else "this process starts the others"
        )
        for name in ("global_rank", "local_rank", "node_rank"):
            known: Setting | None = getattr(topology, name)
            self.settings[name] = known or Setting(0, reason)

    def _main(self, topology: Topology, num_nodes: int) -> None:
        self.settings["main_address"] = topology.main_address or Setting("127.0.0.1", "one machine")
        port = Setting(DEFAULT_PORT, "the default; when it is taken, the next free one")
        if topology.launched or num_nodes > 1:
            port = topology.main_port or Setting(None, "the ranks agree on a free one")
        self.settings["main_port"] = topology.main_port or port

    def _strategy(self, world_size: int, accelerator: AcceleratorConfigBase | None) -> StrategyConfigBase | None:
        single, several = _default_strategies(self.plugins, accelerator)
        tag, reason = (several, f"world_size={world_size}") if world_size > 1 else (single, "one rank")
        config = self._default("strategy", StrategyConfigBase, self.trainer.strategy, tag, reason)
        if config is not None and config.name == "single_device" and world_size > 1:
            self._report(
                "error",
                "capability",
                f"strategy 'single_device' runs one rank, but there are {world_size}",
                "trainer.strategy",
                f"world_size: {self.settings['world_size'].reason}",
                "write `strategy: auto` or `ddp`, or `devices: 1`",
            )
        return config

    def _requeue(self, chosen: ChosenEnvironment) -> RequeueConfigBase | None:
        asked, environment = self.trainer.requeue, chosen.config
        wanted = environment.auto_requeue if environment else None
        signal = environment.requeue_signal if environment else None
        if isinstance(asked, RequeueConfigBase):
            if signal is not None or (wanted is False and asked.name != "none"):
                self._report(
                    "error",
                    "axis-set-twice",
                    "requeueing is set twice: in `requeue` and in the environment's `auto_requeue` or `requeue_signal`",
                    "trainer.requeue",
                    None,
                    "keep one of the two",
                )
            return self._default("requeue", RequeueConfigBase, asked, "none", "")
        tag, reason = "none", "trainer.environment.auto_requeue=false"
        if wanted is not False:
            plugin = self.plugins.of(environment) if environment else None
            tag = plugin.requeue if isinstance(plugin, EnvironmentPlugin) else "none"
            reason = f"the requeuer of {environment.name}" if environment and tag != "none" else "no scheduler to ask"
        config = self._default("requeue", RequeueConfigBase, asked, tag, reason)
        if config is not None and signal is not None:
            config = config.model_copy(update={"signals": (signal,)})
        if config is not None and config.name != "none":
            self._report(
                "info",
                "requeue-not-handled",
                f"this version does not act on signals: requeue {config.name!r} is read, but not used",
                "trainer.requeue",
                "a job that its scheduler requeues goes on from its last regular checkpoint",
                "set checkpoint.every_n_minutes to what you can afford to lose",
            )
        return config

    def _optional(self) -> None:
        if self.trainer.layer_sync is not None:
            self.settings["layer_sync"] = Setting(self.trainer.layer_sync.name, "trainer.layer_sync")
        names = [self.plugins.label(logger) for logger in self.trainer.loggers]
        self.settings["loggers"] = Setting(names, "trainer.loggers" if names else "metrics.csv is always written")

    def _backend(self, accelerator: AcceleratorConfigBase | None) -> str:
        plugin = self.plugins.of(accelerator) if accelerator else None
        backend = plugin.backend if isinstance(plugin, AcceleratorPlugin) else "gloo"
        self.settings["backend"] = Setting(backend, f"for the device {accelerator.name if accelerator else 'cpu'}")
        return backend

    def _engines(self) -> None:
        """Engines that the selected plugins need and that are not installed."""
        # Without torch this is a login node (`fairlead[check]`): the engines are where the job runs.
        severity: Severity = "error" if self.purpose == "run" or self.plugins.is_installed("torch") else "info"
        seen: set[str] = set()
        axes = ("accelerator", "strategy", "precision", "environment", "checkpoint_io", "layer_sync", "requeue")
        selected = [(axis, self.settings[axis].value, f"trainer.{axis}") for axis in axes if axis in self.settings]
        selected += [("logger", name, f"trainer.loggers[{i}]") for i, name in enumerate(self.settings["loggers"].value)]
        for axis, name, where in selected:
            if name not in self.plugins.names(axis):
                continue
            try:
                self.plugins.require_engines(axis, name)
            except MissingDependencyError as error:
                if error.fix not in seen:
                    seen.add(str(error.fix))
                    self._report(severity, "plugin-missing", error.what, where, None, error.fix)
            except PluginError as error:
                self._report("error", "plugin-broken", error.what, where, error.why, error.fix)


def _default_strategies(plugins: PluginManager, accelerator: AcceleratorConfigBase | None) -> tuple[str, str]:
    """What `strategy: auto` is on a device, for one rank and for several."""
    plugin = plugins.of(accelerator) if accelerator is not None else None
    return (plugin if isinstance(plugin, AcceleratorPlugin) else AcceleratorPlugin).strategies
