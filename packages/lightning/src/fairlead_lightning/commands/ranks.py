"""The ranks of a job on this machine: how they are started and restarted."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fairlead
from fairlead.checks import CheckedJob
from fairlead.cli.main import main
from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.detect import VARIABLE
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.user_code import CodeRoot
from fairlead_launch.environment import PLAN, plan_to_inherit, rank_environment
from fairlead_launch.forkserver import CAN_FORK, SERVER_FD, ForkServer
from fairlead_launch.output import Output
from fairlead_launch.ports import DEFAULT_PORT, STORE_FD, bind_listener
from fairlead_launch.processes import Starter, fork, forkable, search_path, spawn
from fairlead_launch.restarts import Restarts, run_with_restarts, stopped_before
from fairlead_launch.supervise import Group, noted_signals
from fairlead_lightning.commands.early import PRELOAD
from fairlead_lightning.display.quiet import TORCH_DEFAULTS
from fairlead_runs.commit.checkpoints import readable_checkpoints


def run_ranks(
    arguments: argparse.Namespace,
    session: Session,
    checked: CheckedJob,
    signals: Sequence[int],
    early: ForkServer | None,
) -> int:
    """Starts one process for each rank of this machine, and watches them.

    `signals` are those that have come already; `early` is a server that has begun to import the libraries.
    """
    with noted_signals(signals) as received:
        ranks = _Ranks(arguments, session, checked, early)
        if not ranks.prepare(received):
            return stopped_before(received, session.stderr)
        try:
            # Ranks that need another start have requested it, or exit with the code that does.
            restarts = Restarts(getattr(arguments, "max_restarts", 0), when_saved=False)
            return run_with_restarts(ranks.group, received, restarts=restarts, stderr=session.stderr)
        finally:
            ranks.close()


def run_forked(*words: str) -> None:
    """What a forked rank does: `python -m fairlead WORDS`."""
    sys.argv = [str(Path(fairlead.__file__).with_name("__main__.py")), *words]
    sys.exit(main(list(words)))


class _Ranks:
    """Makes the groups of one job."""

    def __init__(
        self, arguments: argparse.Namespace, session: Session, checked: CheckedJob, early: ForkServer | None
    ) -> None:
        assert checked.resolution is not None
        self._session, self._checked, self._resolution = session, checked, checked.resolution
        self._words = [*session.argv, *(["--debug"] if session.debug else [])]
        self._start_method = arguments.start_method
        self._early = early
        self._server: ForkServer | None = None
        self._plan: int | None = None
        given = {name: value for name, value in session.environ.items() if name != SERVER_FD}
        self._environ = {**TORCH_DEFAULTS, **given}

    def prepare(self, received: Sequence[int]) -> bool:
        """Has everything imported that is imported once for all ranks; False: a signal came before that was done."""
        if self._start_method == "spawn" or not CAN_FORK:
            return True
        root: CodeRoot = self._checked.loaded.root
        number = self._session.environ.get(SERVER_FD)
        lent = socket.socket(fileno=int(number)) if number is not None else None
        if self._early is not None:
            if forkable(self._early, received, self._session.warn) is None:
                return not received
            lent = self._early.lend()
        server = ForkServer(
            [PRELOAD, *_loaded_here(self._session.plugins), *_runtimes(self._resolution, self._session.plugins)],
            _user_modules(self._checked.loaded.job),
            path=search_path(root),
            environ={"OMP_NUM_THREADS": str(self._resolution.value("threads")), **self._environ},
            title=("fairlead", *self._words),
            connection=lent,
        )
        self._server = forkable(server, received, self._session.warn)
        return not received

    def group(self, starts: int, before: Group | None) -> Group:
        """The ranks of one start."""
        resolution, session = self._resolution, self._session
        single = resolution.num_nodes == 1
        free = single and resolution.topology.main_port is None
        listener = bind_listener(range(DEFAULT_PORT, DEFAULT_PORT + 200)) if free else None
        port = listener.getsockname()[1] if listener is not None else int(resolution.value("main_port"))
        self.close_plan()
        self._plan, variable = plan_to_inherit(_continued(self._checked, before))
        environments = [
            rank_environment(
                # The ranks are in the same environment as this process, however they were started.
                {**self._environ, VARIABLE: str(resolution.value("environment")), PLAN: variable},
                local_rank=local_rank,
                devices=resolution.devices,
                num_nodes=resolution.num_nodes,
                node_rank=int(resolution.value("node_rank")),
                address=str(resolution.value("main_address")),
                port=port,
                threads=int(resolution.value("threads")),
            )
            for local_rank in range(resolution.devices)
        ]
        inherited = []
        if listener is not None:
            inherited = [listener.detach()]
            environments[0][STORE_FD] = str(inherited[0])
        numbers = [int(environ["RANK"]) for environ in environments]
        return Group(
            self._starter(),
            environments,
            Output(numbers, raw=numbers[0]),
            stderr=session.stderr,
            inherited=inherited,
            shared=[self._plan],
        )

    def close_plan(self) -> None:
        """Closes what the ranks of the last start have inherited."""
        if self._plan is not None:
            os.close(self._plan)
            self._plan = None

    def close(self) -> None:
        """Ends what has imported for the ranks."""
        self.close_plan()
        if self._server is not None:
            self._server.close()

    def _starter(self) -> Starter:
        if self._server is not None and self._server.alive():
            return fork(self._server, run_forked, *self._words, cwd=str(self._session.cwd))
        # -P: the working directory is not searched for code unless the rules for user code say so.
        return spawn([sys.executable, "-P", "-m", "fairlead", *self._words])


def _loaded_here(plugins: PluginManager) -> list[str]:
    """The modules of the plugins that reading and checking the job has imported: a rank needs the same ones."""
    modules = (record.value.partition(":")[0] for record in plugins.records())
    return [module for module in dict.fromkeys(modules) if module in sys.modules]


def _runtimes(resolution: Resolution, plugins: PluginManager) -> list[str]:
    """The modules of the engines that the job selects."""
    configs = (resolution.strategy, resolution.precision, resolution.environment, resolution.checkpoint_io)
    named = [plugins.of(config).runtime for config in (*configs, resolution.requeue, *resolution.loggers)]
    return [runtime.partition(":")[0] for runtime in named if runtime is not None]


def _user_modules(job: Any) -> list[str]:
    """The modules that the job names, in the order in which a rank imports them."""
    assert isinstance(job, JobConfig)
    specs = [*job.trainer.callbacks, job.model, *([job.data] if job.data is not None else [])]
    names = [str(spec.class_) for spec in specs if getattr(spec, "class_", None) is not None]
    return list(dict.fromkeys(name.partition(":")[0] for name in names))


def _continued(checked: CheckedJob, before: Group | None) -> CheckedJob:
    """The job of a restart: it continues the run of the last start, whatever that has begun with."""
    job = checked.loaded.job
    assert job is not None
    if before is None or before.run is None or job.run.resume == "auto":
        return checked
    run = Path(before.run.run)
    if job.run.resume != "never" and not readable_checkpoints(run / "checkpoints"):
        return checked  # it begins from the same checkpoint once more
    changed = job.model_copy(update={"run": job.run.model_copy(update={"resume": "auto", "name": run.name})})
    return dataclasses.replace(checked, loaded=dataclasses.replace(checked.loaded, job=changed))
