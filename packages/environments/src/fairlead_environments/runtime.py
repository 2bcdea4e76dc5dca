"""What Lightning asks about ranks, answered from the resolution, which decided it before torch was imported.

It is no subclass of Lightning's own on purpose: for a `SLURMEnvironment`, Lightning installs its own signal handlers
and requeues by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext, Setting
from fairlead_distributed import free_port


def build(config: EnvironmentConfigBase, context: BuildContext) -> ResolvedEnvironment:
    """The cluster environment for Trainer and Fabric."""
    resolution, topology = context.resolution, context.resolution.topology
    launched = topology.launched
    world_size = _value(topology.world_size) if topology.world_size else resolution.world_size if launched else None
    port, preferred = _value(topology.main_port), None
    if port is None:
        if launched and resolution.world_size > 1:
            raise ConfigError(
                f"the environment {config.name!r} gives {resolution.world_size} ranks no port to meet on",
                where="environment variable MASTER_PORT",
                fix="export the same free MASTER_PORT for all ranks",
            )
        # One rank needs no rendezvous: any free port, so that two jobs that start at one moment do not take the same.
        preferred = _value(resolution.settings.get("main_port")) if resolution.world_size > 1 else None
    environment = ResolvedEnvironment(
        launched=launched,
        main_address=_value(topology.main_address) or str(resolution.value("main_address")),
        main_port=port,
        preferred_port=preferred,
        world_size=world_size if launched else None,
        global_rank=_value(topology.global_rank) if launched else None,
        local_rank=_value(topology.local_rank) or 0,
        node_rank=_value(topology.node_rank) or 0,
        num_nodes=_value(topology.num_nodes),
        local_world_size=_value(topology.local_world_size),
        environ=context.environ,
    )
    if launched:
        # Before Lightning sets it: what is printed until then is printed by one rank.
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]
    return environment


def _value(setting: Setting | None) -> Any:
    return None if setting is None else setting.value


class ResolvedEnvironment(ClusterEnvironment):
    """A cluster environment whose answers are fixed where a launcher gave them; None takes what Lightning sets.

    Without `main_port` it takes `preferred_port` if that is free, else a free one, when it is first read. `environ` is
    live: Lightning's launcher writes LOCAL_RANK there.
    """

    def __init__(
        self,
        *,
        launched: bool,
        main_address: str,
        main_port: int | None = None,
        preferred_port: int | None = None,
        world_size: int | None = None,
        global_rank: int | None = None,
        local_rank: int = 0,
        node_rank: int = 0,
        num_nodes: int | None = None,
        local_world_size: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._launched = launched
        self._main_address = main_address
        self._main_port = main_port
        self._preferred_port = preferred_port
        self._fixed_world_size, self._world_size = world_size, 1
        self._fixed_global_rank, self._global_rank = global_rank, local_rank if launched else 0
        self._local_rank, self._node_rank = local_rank, node_rank
        self._num_nodes, self._local_world_size = num_nodes, local_world_size
        self._environ: Mapping[str, str] = {} if environ is None else environ

    def __getstate__(self) -> dict[str, Any]:
        # `os.environ` does not pickle, and `ddp_spawn` sends this object to its ranks, which have their own.
        environ = None if self._environ is os.environ else dict(self._environ)
        return {**self.__dict__, "_environ": environ}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._environ is None:
            self._environ = os.environ

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning is to start no ranks: a launcher did, or Lightning itself did before."""
        return self._launched or "LOCAL_RANK" in self._environ

    @property
    def main_address(self) -> str:
        """Host name or address of the node with rank 0."""
        return self._main_address

    @property
    def main_port(self) -> int:
        """TCP port on the main address."""
        if self._main_port is None:
            self._main_port = free_port("", (self._preferred_port, 0)) if self._preferred_port else free_port("")
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Never: Fairlead detects environments itself."""
        return False

    def world_size(self) -> int:
        """Ranks in all."""
        return self._world_size if self._fixed_world_size is None else self._fixed_world_size

    def set_world_size(self, size: int) -> None:
        """Takes Lightning's number where no launcher gave one."""
        self._world_size = size

    def global_rank(self) -> int:
        """Index of this rank in all."""
        return self._global_rank if self._fixed_global_rank is None else self._fixed_global_rank

    def set_global_rank(self, rank: int) -> None:
        """Takes Lightning's index where no launcher gave one: node rank x devices + local rank errs on uneven nodes."""
        self._global_rank = rank
        rank_zero_only.rank = self.global_rank()  # type: ignore[attr-defined]

    def local_rank(self) -> int:
        """Index of this rank on its node; where no launcher gave one, what Lightning's launcher has exported."""
        return self._local_rank if self._launched else int(self._environ.get("LOCAL_RANK", self._local_rank))

    def node_rank(self) -> int:
        """Index of this node."""
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """A ConfigError where Lightning's numbers are not the launcher's: ranks would wait for others for ever."""
        if not self._launched:
            return
        pairs = (("devices", num_devices, self._local_world_size), ("num_nodes", num_nodes, self._num_nodes))
        for name, requested, started in pairs:
            if started is not None and requested != started:
                raise ConfigError(
                    f"{name} is {requested}, but the launcher started {started}",
                    where=f"trainer.{name}",
                    fix=f"write `{name}: auto`, or start the job with {requested}",
                )

    def teardown(self) -> None:
        """Removes the WORLD_SIZE that Lightning's own launcher exported, as Lightning's environment does."""
        if not self._launched and isinstance(self._environ, MutableMapping) and self._environ is os.environ:
            self._environ.pop("WORLD_SIZE", None)
