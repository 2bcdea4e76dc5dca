"""Any script on N processes, restarted after failures: `fairlead launch`, and the same from Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

from fairlead.detect import VARIABLE, find_jobs
from fairlead.errors import ConfigError, FairleadError
from fairlead.facts import Devices
from fairlead.plugin_classes import AcceleratorPlugin
from fairlead.plugins import PluginManager
from fairlead.threads import choose_threads
from fairlead_launch.environment import BACKEND, rank_environment
from fairlead_launch.forkserver import CAN_FORK, ForkServer
from fairlead_launch.hosts import launch_on_hosts
from fairlead_launch.outer_launch import OuterLaunch, find_outer_launch
from fairlead_launch.output import Output
from fairlead_launch.participant import Members, Participant
from fairlead_launch.ports import HeldPort
from fairlead_launch.preloading import head_imports, module_file
from fairlead_launch.processes import Starter, fork, forkable, spawn
from fairlead_launch.restarts import Restarts, run_with_restarts, stopped_before
from fairlead_launch.settings import LaunchConfig
from fairlead_launch.supervise import Group, noted_signals
from fairlead_launch.worker import run_worker
from fairlead_runs.waiting import parse_ranks


def processes_per_node(requested: int | str, environ: Mapping[str, str], plugins: PluginManager) -> tuple[int, str]:
    """How many processes a node has, and why; `ConfigError`: one for each GPU is requested, and there is no GPU."""
    if isinstance(requested, int):
        return requested, "--nproc"
    kinds = [cast("AcceleratorPlugin", plugin) for plugin in plugins.distinct("accelerator").values()]
    for kind in sorted(kinds, key=lambda kind: -kind.priority):
        if kind.priority > 0:
            for devices in plugins.call(kind, "fairlead_devices", environ=environ):
                if isinstance(devices, Devices) and devices.count:
                    return devices.count, f"{devices.count} found by {devices.evidence}"
    if requested == "gpu":
        raise ConfigError(
            "there is no GPU on this machine",
            where="--nproc gpu",
            fix="say how many processes: --nproc 4; or --nproc auto, which takes one where there is no GPU",
        )
    return 1, "no GPU was found"


class DistributedLauncher:
    """Starts a script on the processes of this node, and watches them.

    Example:
        >>> launcher = DistributedLauncher(LaunchConfig(nproc_per_node=2))
        >>> launcher.launch("train.py", "--epochs", "100")  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        config: LaunchConfig,
        *,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.config = config
        self._environ = dict(os.environ if environ is None else environ)
        self._plugins = plugins or PluginManager()
        self._stderr = stderr or sys.stderr
        self._server: ForkServer | None = None
        self._announced = False

    def launch(self, script: str | os.PathLike[str], *words: str) -> int:
        """Runs the script with these words on all processes; returns the exit code: 0 when all went well.

        How one has failed is written to stderr. 75: it was stopped with everything saved.
        """
        try:
            return self.run(script, *words)
        except FairleadError as error:
            print(f"error: {error.block()}", file=self._stderr, flush=True)
            return error.exit_code

    def run(self, script: str | os.PathLike[str], *words: str) -> int:
        """As `launch`, but a failure is raised: `RunFailedError`, `ConfigError`."""
        name = os.fspath(script)
        path = module_file(name, os.getcwd()) if self.config.module else Path(name)
        if not self.config.module and not Path(name).is_file():
            raise ConfigError(f"there is no script {name!r}", where=os.getcwd(), fix="for a module write: -m MODULE")
        if self.config.hosts is not None or self.config.hostfile is not None:
            with noted_signals() as received:
                return launch_on_hosts(self.config, (name, *words), self._environ, received, self._stderr)
        count, reason = processes_per_node(self.config.nproc_per_node, self._environ, self._plugins)
        if not self.config.placed:
            outer = find_outer_launch(self.config.nproc_per_node, count, self._environ, self._plugins)
            if outer is not None and outer.rank is not None:
                return self._be_rank(outer, name, *words)
            if outer is not None:
                self._be_node(outer)
        with noted_signals() as received:
            if not self._prepare(path, name, words, received):
                return stopped_before(received, self._stderr)
            try:
                return self._run(count, reason, received, (name, *words))
            finally:
                if self._server is not None:
                    self._server.close()

    def _be_rank(self, outer: OuterLaunch, *words: str) -> int:
        """Runs the script in this process, which is a rank already."""
        if outer.rank == 0:
            self._say(f"already launched by {outer.by}: {outer.world_size} ranks, and this is one; it restarts them")
        own = outer.variables() | ({BACKEND: self.config.backend} if self.config.backend != "auto" else {})
        os.environ.update({name: value for name, value in own.items() if name not in self._environ})
        run_worker(self.config.module, *words)
        return 0

    def _be_node(self, outer: OuterLaunch) -> None:
        """Takes the numbers of this node from what has started its launcher."""
        self._say(f"started by {outer.by}: this is node {outer.node_rank} of {outer.num_nodes}")
        self.config = self.config.model_copy(
            update={
                "nnodes": outer.num_nodes,
                "node_rank": outer.node_rank,
                "master_addr": outer.address,
                "master_port": self.config.master_port or outer.port,
            }
        )

    def _run(self, count: int, reason: str, received: list[int], words: Sequence[str]) -> int:
        config = self.config
        restarts = Restarts(config.max_restarts, when_saved=not find_jobs(self._environ, self._plugins))
        if config.nodes == (1, 1):
            with closing(HeldPort()) as held:

                def group(starts: int, _before: Group | None) -> Group:
                    port = config.master_port or held.hold(range(29500, 29700))  # another one for each start
                    return self._group(Members(1, 0, config.master_addr, port, starts), count, reason, words)

                return run_with_restarts(group, received, restarts=restarts, stderr=self._stderr)
        nodes = Participant(
            config.master_addr,
            config.master_port,
            nodes=config.nodes,
            rank=config.node_rank,
            count=count,
            start_s=config.start_timeout,
            restarts=restarts,
            say=self._say,
        )
        with closing(nodes):
            return nodes.run(lambda members: self._group(members, count, reason, words, nodes.trouble), received)

    def _prepare(self, path: Path | None, name: str, words: Sequence[str], received: Sequence[int]) -> bool:
        """Has the head of the script imported once for all; False: a signal came before that was done."""
        if self.config.start_method == "spawn" or path is None or not CAN_FORK:
            return True
        here = os.getcwd() if self.config.module else str(path.absolute().parent)
        server = ForkServer(
            (),
            head_imports(path),
            path=[here, *sys.path],
            environ=self._environ,
            title=(name, *words),
        )
        self._server = forkable(server, received, self._say)
        return not received

    def _group(
        self,
        members: Members,
        count: int,
        reason: str,
        words: Sequence[str],
        trouble: Callable[[int | None], str | None] = lambda _stop: None,
    ) -> Group:
        """The processes of one start on this node."""
        config = self.config
        own = {
            VARIABLE: self._environ.get(VARIABLE, "lightning"),
            "TORCHELASTIC_RESTART_COUNT": str(members.start),
            **({BACKEND: config.backend} if config.backend != "auto" else {}),
        }
        threads = choose_threads("auto", self._environ, count)
        environments = [
            rank_environment(
                {**self._environ, **own},
                local_rank=local_rank,
                devices=count,
                num_nodes=members.num_nodes,
                node_rank=members.node_rank,
                address=members.address,
                port=members.port,
                threads=int(threads.value),
            )
            for local_rank in range(count)
        ]
        numbers = [int(environ["RANK"]) for environ in environments]
        if members.changed is not None:
            self._say(members.changed)
        if not self._announced or members.changed is not None:
            self._announced = True
            total = count * members.num_nodes
            self._say(
                f"{total} process{'es'[: 2 * (total > 1)]} on {members.num_nodes} node{'s'[: members.num_nodes > 1]} "
                f"({count} each: {reason}), Master: {members.address}:{members.port}, {threads.value} "
                f"thread{'s'[: threads.value != 1]} each"
            )
        shown = {"all": frozenset(numbers), "none": frozenset[int]()}.get(config.tail)
        output = Output(
            numbers,
            raw=numbers[0] if count == members.num_nodes == 1 and config.tail == "all" else None,
            shown=shown if shown is not None else parse_ranks(config.tail),
            folder=Path(config.log_dir) if config.log_dir is not None else None,
            fallback=Path("logs"),
        )
        return Group(
            self._starter(words),
            environments,
            output,
            stderr=self._stderr,
            poll_s=config.monitor_interval,
            join_s=config.start_timeout,
            trouble=trouble,
        )

    def _starter(self, words: Sequence[str]) -> Starter:
        if self._server is not None and self._server.alive():
            return fork(self._server, run_worker, self.config.module, *words, cwd=os.getcwd())
        kind = "module" if self.config.module else "script"
        return spawn([sys.executable, "-P", "-m", "fairlead_launch.worker", kind, *words])

    def _say(self, text: str) -> None:
        print(f"launch      {text}", file=self._stderr, flush=True)


def launch_distributed_training(script: str, *words: str, **settings: Any) -> int:
    """Runs a script with these words on all processes of this node; returns the exit code.

    Args:
        script: The script.
        words: Its arguments.
        settings: The fields of `LaunchConfig`.

    Example:
        >>> launch_distributed_training("train.py", "--epochs", "1", nproc_per_node=2)  # doctest: +SKIP
        0
    """
    return DistributedLauncher(LaunchConfig(**settings)).launch(script, *words)
