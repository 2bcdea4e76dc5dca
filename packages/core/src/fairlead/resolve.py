"""From a config and an environment to a decision on every setting, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fairlead.by_hand import commands_by_hand
from fairlead.config import ResourcesConfig, RunConfig, TrainerConfig
from fairlead.config_bases import (
    AXES,
    AcceleratorConfigBase,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    LayerSyncConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
from fairlead.detect import FALLBACK, ChosenEnvironment, choose_environment, choose_requeuer
from fairlead.errors import MissingDependencyError, PluginError
from fairlead.facts import Job, Setting
from fairlead.findings import Finding, Severity
from fairlead.hardware import choose_accelerator, count_devices
from fairlead.network import network_findings, network_settings
from fairlead.partial_resolution import PartialResolution, Purpose
from fairlead.plugin_classes import AcceleratorPlugin, EnvironmentPlugin, StrategyPlugin
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.threads import choose_threads
from fairlead.topology import Topology
from fairlead.world_size import contradicted, nodes_from_world_size

__all__ = ["Resolution", "resolve"]

DEFAULT_PORT = 29500


def resolve(
    trainer: TrainerConfig,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
    run: RunConfig | None = None,
    profile: ResourcesConfig | None = None,
    purpose: Purpose = "check",
) -> Resolution:
    """Decides every setting of a run, for the hardware of `profile` if there is one; of `run` only `resume` is read.

    With the purpose `run`, absent hardware and absent engines are errors.
    """
    return _Resolver(trainer, environ, plugins, run or RunConfig(), profile, purpose).resolve()


class _Resolver(PartialResolution):
    """One resolution in progress: the order of the methods is the order of the decisions."""

    def resolve(self) -> Resolution:
        chosen = choose_environment(
            self.trainer.environment, self.environ, self.plugins, starting=self.purpose == "run"
        )
        self.findings += chosen.findings
        self.settings["environment"] = chosen.setting
        self.inside_job = chosen.inside_job and self.profile is None
        topology = (chosen.topology if self.profile is None else None) or Topology(launched=False)
        requested = self._requested_strategy()
        accelerator, found = choose_accelerator(self, requested.accelerator if requested is not None else None)
        one = requested is not None and requested.one_rank
        devices, indices = count_devices(self, accelerator, found, topology, one=one)
        topology = nodes_from_world_size(topology, devices)
        num_nodes = self._num_nodes(topology)
        strategy = self._strategy(devices, num_nodes, topology, accelerator)
        devices, driven = self._driven(devices, num_nodes, topology, strategy)
        world_size = self._world_size(devices, num_nodes, topology, driven)
        self._exported_world_size(chosen, topology)
        self._threads(topology, devices, chosen.job)
        self._ranks(topology, chosen)
        self._main(topology, num_nodes)
        self.settings["strategy"] = self.settings.pop("strategy")  # where it is shown: behind the ranks
        self._single_rank(world_size, strategy)
        precision = self.default("precision", PrecisionConfigBase, self.trainer.precision, "32-true", "the default")
        checkpoint_io = self._checkpoint_io(strategy)
        requeue = self._requeue(chosen)
        layer_sync = self._layer_sync()
        names = [self.plugins.label(logger) for logger in self.trainer.loggers]
        self.settings["loggers"] = Setting(names, "trainer.loggers" if names else "metrics.csv is always written")
        backend, device_type = self._backend(accelerator, strategy)
        self._network(chosen.config, backend)
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
            layer_sync=layer_sync,
            loggers=self.trainer.loggers,
            num_nodes=num_nodes,
            devices=devices,
            device_indices=indices,
            world_size=world_size,
            devices_per_rank=driven,
            device_type=device_type,
            backend=backend,
            devices_found=found,
            inside_job=self.inside_job,
            job=chosen.job,
            findings=tuple(self.findings),
        )

    def _layer_sync(self) -> LayerSyncConfigBase | None:
        requested = self.trainer.layer_sync
        if requested is not None:
            self.settings["layer_sync"] = Setting(requested.name, "trainer.layer_sync")
        elif self.trainer.sync_batchnorm:  # not Lightning's own, which has no layers for a CPU
            return self.default(
                "layer_sync", LayerSyncConfigBase, "auto", "torch_sync_batchnorm", "trainer.sync_batchnorm"
            )
        return requested

    def _num_nodes(self, topology: Topology) -> int:
        requested, launched = self.trainer.num_nodes, topology.num_nodes
        if not self.trainer.auto_determine_num_nodes and requested == "auto":
            requested = 1
        if self.profile is not None:
            return self._profiled_nodes(requested, self.profile)
        if isinstance(requested, int):
            alone = self.settings["environment"].value == FALLBACK and not topology.launched
            if requested > 1 and alone:
                self._not_started(requested)
            elif launched is not None and launched.value != requested:
                self.mismatch("num_nodes", requested, launched, "nodes")
            path = "trainer.num_nodes" if self.trainer.num_nodes == requested else "trainer.auto_determine_num_nodes"
            self.settings["num_nodes"] = launched if launched is not None else Setting(requested, path)
        else:
            self.settings["num_nodes"] = launched or Setting(1, "one machine")
        return int(self.settings["num_nodes"].value)

    def _not_started(self, nodes: int) -> None:
        """Several nodes were requested, and this process was not started by anything that knows them."""
        self.report(
            self.hardware_severity(),
            "launch-mismatch",
            f"trainer.num_nodes is {nodes}, but nothing started ranks on other nodes",
            where="trainer.num_nodes",
            why=f"the environment is {self.settings['environment'].value}: {self.settings['environment'].reason}",
            fix="\n".join(
                ["start it with srun or mpirun, or by hand, one command on each node:", *commands_by_hand(nodes)]
            ),
        )

    def _profiled_nodes(self, requested: int | str, profile: ResourcesConfig) -> int:
        """Nodes of `resources`; asking for fewer is fine."""
        if isinstance(requested, int) and requested > profile.nodes:
            self.report(
                "error",
                "profile-mismatch",
                f"the job asks for {requested} nodes, its resources have {profile.nodes}",
                where="trainer.num_nodes",
                fix=f"write `num_nodes: auto` or `resources.nodes: {requested}`",
            )
        nodes, reason = (
            (requested, "trainer.num_nodes") if isinstance(requested, int) else (profile.nodes, "resources.nodes")
        )
        self.settings["num_nodes"] = Setting(nodes, reason)
        return nodes

    def _world_size(self, devices: int, num_nodes: int, topology: Topology, driven: int) -> int:
        ranks = self._ranks_in_all(devices, num_nodes, topology)
        reason = f"{devices} devices x {num_nodes} nodes"
        if driven > 1:
            reason = f"one process drives all {driven} devices (strategy {self.settings['strategy'].value})"
        launched = topology.world_size if topology.launched else None
        self.settings["world_size"] = launched or Setting(ranks, reason)
        return ranks

    @staticmethod
    def _ranks_in_all(devices: int, num_nodes: int, topology: Topology) -> int:
        launched = topology.world_size if topology.launched else None
        return int(launched.value) if launched is not None else devices * num_nodes

    def _exported_world_size(self, chosen: ChosenEnvironment, topology: Topology) -> None:
        plugin = self.plugins.of(chosen.config) if chosen.config is not None else None
        if self.profile is not None or chosen.topology is None:
            return  # not the machine, or not the rank, that the variable is about
        if isinstance(plugin, EnvironmentPlugin) and plugin.reads_world_size:
            return
        found = contradicted(self.environ, topology, self.settings["world_size"])
        self.findings += [found] if found is not None else []

    def _threads(self, topology: Topology, devices: int, job: Job | None) -> None:
        if self.profile is None:  # of another machine it is not known how many CPUs there are
            local = topology.local_world_size.value if topology.local_world_size is not None else devices
            self.settings["threads"] = choose_threads(self.trainer.threads, self.environ, max(1, int(local)), job=job)

    def _ranks(self, topology: Topology, chosen: ChosenEnvironment) -> None:
        reason = "this process starts the others"
        if chosen.topology is None and self.profile is None and chosen.setting.value != FALLBACK:
            reason = f"here; {chosen.setting.value} says when it starts the ranks"
        for name in ("global_rank", "local_rank", "node_rank"):
            known: Setting | None = getattr(topology, name)
            self.settings[name] = known or Setting(0, reason)

    def _main(self, topology: Topology, num_nodes: int) -> None:
        self.settings["main_address"] = topology.main_address or Setting("127.0.0.1", "one machine")
        port = Setting(DEFAULT_PORT, "the default; when it is taken, the next free one")
        if topology.launched or num_nodes > 1:
            port = topology.main_port or Setting(None, "the ranks agree on a free one")
        self.settings["main_port"] = topology.main_port or port

    def _requested_strategy(self) -> StrategyPlugin | None:
        """The plugin of the strategy that the config names; None: `auto`, or one that is not installed."""
        requested = self.trainer.strategy
        plugin = self.plugins.of(requested) if isinstance(requested, StrategyConfigBase) else None
        return plugin if isinstance(plugin, StrategyPlugin) else None

    def _strategy(
        self, devices: int, num_nodes: int, topology: Topology, accelerator: AcceleratorConfigBase | None
    ) -> StrategyConfigBase | None:
        plugin = self.plugins.of(accelerator) if accelerator is not None else None
        single, several = (plugin if isinstance(plugin, AcceleratorPlugin) else AcceleratorPlugin).strategies
        ranks = self._ranks_in_all(devices, num_nodes, topology)
        tag, reason = (several, f"world_size={ranks}") if ranks > 1 else (single, "one rank")
        if single == several:
            reason = f"accelerator {self.settings['accelerator'].value}"
        return self.default("strategy", StrategyConfigBase, self.trainer.strategy, tag, reason)

    def _driven(
        self, devices: int, num_nodes: int, topology: Topology, strategy: StrategyConfigBase | None
    ) -> tuple[int, int]:
        """Ranks on this node, and the devices of each: as many ranks as devices, unless one process drives them all."""
        plugin = self.plugins.of(strategy) if strategy is not None else None
        one = isinstance(plugin, StrategyPlugin) and plugin.one_process
        if not one or topology.launched or num_nodes > 1 or devices == 1:
            return devices, 1
        return 1, devices

    def _single_rank(self, world_size: int, strategy: StrategyConfigBase | None) -> None:
        plugin = self.plugins.of(strategy) if strategy is not None else None
        if isinstance(plugin, StrategyPlugin) and plugin.one_rank and world_size > 1:
            self.report(
                "error",
                "capability",
                f"strategy {plugin.tag!r} runs one rank, but there are {world_size}",
                where="trainer.strategy",
                why=f"world_size: {self.settings['world_size'].reason}",
                fix="write `strategy: auto` or `ddp`, or `devices: 1`",
            )

    def _checkpoint_io(self, strategy: StrategyConfigBase | None) -> CheckpointIOConfigBase | None:
        plugin = self.plugins.of(strategy) if strategy is not None else None
        tag = plugin.checkpoint_io if isinstance(plugin, StrategyPlugin) else None
        reason = f"the strategy {self.settings['strategy'].value} accepts no other" if tag else "the default"
        return self.default("checkpoint_io", CheckpointIOConfigBase, self.trainer.checkpoint_io, tag or "torch", reason)

    def _requeue(self, chosen: ChosenEnvironment) -> RequeueConfigBase | None:
        requested, environment = self.trainer.requeue, chosen.config
        wanted = environment.auto_requeue if environment else None
        signal = environment.requeue_signal if environment else None
        if isinstance(requested, RequeueConfigBase):
            if signal is not None or (wanted is False and requested.name != "none"):
                self.report(
                    "error",
                    "axis-set-twice",
                    "requeueing is set twice: in `requeue` and in the environment's `auto_requeue` or `requeue_signal`",
                    where="trainer.requeue",
                    fix="keep one of the two",
                )
            return self.default("requeue", RequeueConfigBase, requested, "none", "")
        tag, reason = "none", "trainer.environment.auto_requeue=false"
        if wanted is not False:
            name = environment.name if environment is not None else None
            tag, reason = choose_requeuer(name, chosen.jobs, self.environ, self.plugins)
        config = self.default("requeue", RequeueConfigBase, requested, tag, reason)
        if config is not None and signal is not None:
            config = config.model_copy(update={"signals": (signal,)})
        return config

    def _backend(
        self, accelerator: AcceleratorConfigBase | None, strategy: StrategyConfigBase | None
    ) -> tuple[str, str]:
        """The backend of torch.distributed, and the device type that it is for."""
        plugin = self.plugins.of(accelerator) if accelerator else None
        backend, device = "gloo", "cpu"
        if isinstance(plugin, AcceleratorPlugin):
            backend, device = plugin.backend, plugin.device_type or plugin.tag
        reason = f"for the device {device}"
        requested: str = getattr(strategy, "process_group_backend", "auto")
        if requested != "auto":
            backend, reason = requested, "trainer.strategy.process_group_backend"
        elif device != "cpu" and backend != "gloo" and getattr(strategy, "cpu_offload", False):
            backend = f"cpu:gloo,{device}:{backend}"
            reason += ", and for what trainer.strategy.cpu_offload keeps in CPU memory"
        self.settings["backend"] = Setting(backend, reason)
        return backend, device

    def _network(self, environment: EnvironmentConfigBase | None, backend: str) -> None:
        if environment is not None:
            self.settings.update(network_settings(environment, self.environ))
            self.findings += network_findings(environment, backend, self.environ)

    def _engines(self) -> None:
        """Engines that the selected plugins need and that are not installed, or not in a version that was tested."""
        # Without torch this is a login node (`fairlead[check]`): the engines are where the job runs.
        severity: Severity = "error" if self.purpose == "run" or self.plugins.version("torch") else "info"
        seen: set[str] = set()
        selected = [(axis, self.settings[axis].value, f"trainer.{axis}") for axis in AXES if axis in self.settings]
        selected += [("logger", name, f"trainer.loggers[{i}]") for i, name in enumerate(self.settings["loggers"].value)]
        for axis, name, where in selected:
            if name not in self.plugins.names(axis):
                continue
            try:
                self.plugins.require_engines(axis, name)
            except MissingDependencyError as error:
                if error.fix not in seen:
                    seen.add(str(error.fix))
                    self.findings.append(Finding.of(error, severity, "plugin-missing", where=where))
            except PluginError as error:
                self.findings.append(Finding.of(error, "error", "plugin-broken", where=where))
        self.findings += self.plugins.version_findings(one for one in selected if one[1] in self.plugins.names(one[0]))
