"""A job of several nodes, checked before its ranks meet."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from fairlead.detect import choose_environment
from fairlead.errors import ConfigError
from fairlead.plugins import default_plugins
from fairlead_distributed import _environ
from fairlead_distributed.info import DistributedInfo, get_distributed_info, is_initialized
from fairlead_distributed.process_group import init_process_group
from fairlead_launch.hosts import node_commands
from fairlead_launch.settings import LaunchConfig


class MultiNodeTrainingManager:
    """Checks that this process is a rank of the job that was requested, and has it join the others.

    Example:
        >>> manager = MultiNodeTrainingManager()
        >>> info = manager.setup(num_nodes=2, gpus_per_node=8)  # doctest: +SKIP
        >>> info["world_size"]  # doctest: +SKIP
        16
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = _environ.or_process(environ)

    def setup(self, num_nodes: int, gpus_per_node: int, *, backend: str = "auto") -> DistributedInfo:
        """Joins the process group of `num_nodes` x `gpus_per_node` ranks, and says what this process is in it.

        Without GPUs the ranks are as many processes on CPUs. A group that is there already is only checked.

        Raises:
            ConfigError: What was launched is another job, or nothing was: the message has the command of each node.
            RendezvousError: The others did not come.
        """
        for name, value in (("num_nodes", num_nodes), ("gpus_per_node", gpus_per_node)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", where="MultiNodeTrainingManager.setup", fix="ask for 1 or more")
        wanted = num_nodes * gpus_per_node
        where = f"MultiNodeTrainingManager.setup: {num_nodes} nodes x {gpus_per_node} = {wanted} ranks"
        commands = self._commands(num_nodes, gpus_per_node)
        _rank, world = _environ.rank_and_world_size(self._environ)
        if world == 1 and wanted > 1:
            raise ConfigError(
                f"nothing has started the {wanted} ranks of this job: this process is alone",
                where=where,
                why="neither a scheduler nor a launcher has set RANK and WORLD_SIZE",
                fix="\n".join(["start it with srun or mpirun, or one command on each node:", *commands]),
            )
        found = {"ranks": (world, wanted), **self._nodes(num_nodes, gpus_per_node)}
        if wrong := [
            f"{there} {name}, not {requested}" for name, (there, requested) in found.items() if there != requested
        ]:
            raise ConfigError(
                f"another job was launched: {', '.join(wrong)}",
                where=where,
                fix="\n".join(["change the numbers in setup(), or start it so, one command on each node:", *commands]),
            )
        if not is_initialized():
            init_process_group(backend, environ=self._environ)
        return get_distributed_info()

    def _nodes(self, num_nodes: int, gpus_per_node: int) -> dict[str, tuple[int, int]]:
        """What the launcher says of the nodes, beside what was requested."""
        topology = choose_environment("auto", self._environ, default_plugins(), starting=True).topology
        if topology is None or not topology.launched:
            return {}
        found = {
            "nodes": (topology.num_nodes, num_nodes),
            "ranks on this node": (topology.local_world_size, gpus_per_node),
        }
        return {name: (int(there.value), requested) for name, (there, requested) in found.items() if there is not None}

    @staticmethod
    def _commands(num_nodes: int, gpus_per_node: int) -> list[str]:
        script = sys.argv[0] if os.path.isfile(sys.argv[0]) else "train.py"
        config = LaunchConfig(nnodes=num_nodes, nproc_per_node=gpus_per_node, monitor_interval=0.1)
        return node_commands(config, [script, *sys.argv[1:]])
