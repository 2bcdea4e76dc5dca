"""What an open run has, whatever the engine: its session, what notices a stop, a failure watch, its metrics."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from fairlead.backends import build_backend, imported
from fairlead.config import RunConfig, TrainerConfig
from fairlead.errors import ConfigError, PluginError
from fairlead.interfaces import BuildContext, Extras
from fairlead.plugin_classes import CheckpointIOPlugin
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.resolve import resolve
from fairlead.validation import validated
from fairlead_distributed.info import get_local_rank, get_rank, get_world_size
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.ending import Boundary, Ending
from fairlead_distributed.run.failure_watch import FailureWatch
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.proof import RankProof, owners_of
from fairlead_distributed.run.scripts import advice_for_scripts, as_seen, described_job
from fairlead_distributed.run.session import RunSession
from fairlead_runs.batch_size import batch_plan
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.describe import described
from fairlead_runs.guard import StopGuard, build_guard
from fairlead_runs.heartbeat import location_of_thread
from fairlead_runs.lasting_output import give_output_back, keep_output
from fairlead_runs.logger_positions import LOGGER_POSITIONS, logger_positions, resume_position
from fairlead_runs.metrics_file import MetricsFile

_BACKEND: Final = "remote"


def store_copies(copy_to: str | Mapping[str, Any], plugins: PluginManager) -> CheckpointCopies:
    """The copies at a URL, as `s3://bucket/runs`, or by the settings of `checkpoint_io: remote` with its `url`.

    Raises:
        ConfigError: A setting is wrong.
        FairleadError: The plugin is not installed.
    """
    plugin = plugins.get("checkpoint_io", _BACKEND)
    if not isinstance(plugin, CheckpointIOPlugin) or plugin.copies is None:
        raise PluginError(f"the checkpoint_io {_BACKEND!r} copies nothing by itself", where="copy_to")
    fields = copy_to if isinstance(copy_to, Mapping) else {"url": copy_to}
    config = validated(plugin.config, fields, "copy_to", plugins)
    copies: CheckpointCopies = imported(plugin.copies, f"the checkpoint_io {_BACKEND!r}")(config)
    return copies


class Stopped(SystemExit):
    """All ranks have agreed to stop, and everything is saved; ends the process with the right exit code.

    Attributes:
        outcome: What was done, as `fairlead_hpc_signals.StopOutcome` describes it.
    """

    def __init__(self, outcome: Any) -> None:
        super().__init__(outcome.exit_code)
        self.outcome = outcome


class OpenRun(ABC):
    """The run of a script, from its opening to its end; an engine's own adds how it saves and restores.

    Attributes:
        steps: Optimizer steps that are done, over all starts.
        finished: How the run ended, when there is nothing left to do; else None.
        accumulate_grad_batches: Batches of each rank to one optimizer step.
    """

    def __init__(
        self,
        run: RunConfig,
        config: TrainerConfig,
        *,
        environ: Mapping[str, str],
        plugins: PluginManager,
        guard: StopGuard | None,
        copy_to: str | Mapping[str, Any] | None = None,
    ) -> None:
        proof = RankProof.of(environ)
        if proof is not None:  # which copies nothing, and has nothing restarted
            config, copy_to = proof.without_requeue(config, plugins), None
        self.steps = 0
        self.finished: str | None = None
        self.accumulate_grad_batches = 1
        self._run = run
        self._trainer = config
        self._environ = environ
        self._plugins = plugins
        self.copies = store_copies(copy_to, plugins) if copy_to is not None else None
        """What copies the checkpoints to an object store."""
        self._guard, self._given_guard = guard, guard is not None
        self._watch = FailureWatch(environ)
        self._session: RunSession | None = None
        self._ending: Ending | None = None
        self._boundary: Boundary | None = None
        self._metrics: MetricsFile | None = None
        self._loggers: list[Any] = []
        self._context: BuildContext | None = None

    @abstractmethod
    def progress(self) -> object:
        """Changes with each batch and step."""

    def _open(self, settings: Mapping[str, Any], modules: Mapping[str, nn.Module], by: str, **seen: Any) -> None:
        """Opens the run on all ranks; `settings` and `modules` are what identifies it, `by` is the engine.

        `seen` is what else the engine knows, by the names of the settings.

        Raises:
            ConfigError: There are more ranks than are connected, or the run cannot be opened.
        """
        if self._session is not None:
            raise ConfigError(f"a {by} is opened once", where=by, fix="make a new one for another start")
        if dist.is_initialized():
            leave_at_exit()
        resolution = resolve(self._trainer, environ=self._environ, plugins=self._plugins)
        topology = resolution.topology
        ranks = get_world_size()
        seen |= {
            "world_size": ranks,
            "num_nodes": topology.num_nodes.value if topology.num_nodes is not None and ranks > 1 else 1,
            "global_rank": get_rank(),
            "local_rank": get_local_rank(self._environ),
            "node_rank": topology.node_rank.value if topology.node_rank is not None else 0,
        }
        connect = f"call fairlead_distributed.init_process_group() before {by}"
        with advice_for_scripts():
            resolution = as_seen(resolution, seen, self._trainer, by=by, connect=connect)
            context = self._context = BuildContext(resolution, self._environ, self._plugins)
            guard = self._guard = self._guard or build_guard(context)
            try:
                if not self._given_guard and threading.current_thread() is threading.main_thread():
                    guard.flags.install()
                if get_rank() == 0:
                    guard.watch_opening("opening the run")
                plain = {name: getattr(one, "_orig_mod", one) for name, one in modules.items()}  # not compiled
                job = described_job(self._run, {name: described(one) for name, one in plain.items()}, None, settings)
                session = open_session(job, resolution, self._run, environ=self._environ, copies=self.copies)
            except BaseException as error:
                if not self._given_guard:  # the script's may serve another run
                    self._leave_signals(error)
                raise
            self._session = session
        keep_output()
        self.finished = session.finished
        if self.finished is not None:
            self.say(f"{session.path} is finished: {self.finished}")
            return
        try:
            session.join(seen["global_rank"], seen["local_rank"], seen["node_rank"])
            session.beat("setup", 0)
            self.accumulate_grad_batches = batch_plan(resolution, session.previous)
            for message in session.messages:
                self.say(message)
            self._watch.watch(session, get_rank(), seen["local_rank"], self.progress)
            if session.proof is not None:
                session.proof.watch(lambda: owners_of(plain))
            self._prepare(session, resolution)
            self._ending = _RunEnding(self, session, guard, context)
            self._ending.prepare()
            guard.start()
            guard.watch_switches(session.path, session.event)
            self._boundary = Boundary(session, guard)
        except BaseException as error:
            self._close(error)
            raise

    @abstractmethod
    def _prepare(self, session: RunSession, resolution: Resolution) -> None:
        """The run is open, and not finished."""

    def _log_from(self, step: int | None, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Opens `metrics.csv` and the loggers on rank 0, cut back to where they stood when a checkpoint was saved.

        `step` is that of the checkpoint, None: they begin; `saved` has their positions; `settings` are shown.
        """
        if get_rank():
            return
        session, context = self._opened(), self._context
        assert context is not None
        position = resume_position(saved, MetricsFile.position_key)
        self._metrics = MetricsFile(session.path, step, position, session.fence)
        extras: Extras = {
            "resumed": session.resumed,
            "resume_step": None if step is None else step + 1,  # rows are named by the steps that are done
            "logger_positions": saved.get(LOGGER_POSITIONS, {}),
            "run_name": session.path.name,
        }
        context = dataclasses.replace(context, run_dir=session.path, extras=extras)
        built = (build_backend(logger, context) for logger in context.resolution.loggers)
        self._loggers = [logger for logger in built if logger is not None]
        for logger in self._loggers:
            logger.log_hyperparams(dict(settings))
            _ = getattr(logger, "experiment", None)  # a service is reached before the first step, or never

    def _write_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the values of a step to `metrics.csv` and the loggers, on rank 0."""
        if self._metrics is not None:
            self._metrics.add(step, values)
            self._metrics.flush()
        for logger in self._loggers:
            logger.log_metrics(values, step)

    def _log_positions(self) -> dict[str, Any]:
        """Where they stand, for a checkpoint."""
        return {LOGGER_POSITIONS: logger_positions([self._metrics, *self._loggers])}

    @abstractmethod
    def _finish_writes(self) -> None:
        """Waits for what is written in the background, on this rank alone: the others may be gone."""

    def _close(self, error: BaseException | None) -> None:
        """Ends this start; an error that leaves the training is recorded, and the other ranks are notified."""
        session, guard = self._opened(), self._guard
        try:
            if self.finished is None and error is not None and not isinstance(error, Stopped):
                if guard is not None and guard.lost(error):
                    guard.ended_by(error)
                session.raised(error, self.steps, stopped=isinstance(error, (KeyboardInterrupt, SystemExit)))
            self._finish_writes()
        finally:
            self._watch.left_by(error)
            self.close_metrics("failed" if isinstance(error, Exception) else "success")
            self._leave_signals(error)
            if self.copies is not None and get_rank() == 0:
                self.copies.close()
            session.close()
            give_output_back()

    def _leave_signals(self, error: BaseException | None) -> None:
        """Ends the guard; after a stop its handlers stay, as the process is to end."""
        guard = self._guard
        if guard is not None:
            guard.close(failed=isinstance(error, Exception))
            if guard.outcome is None and not self._given_guard:
                guard.flags.uninstall()

    def _opened(self) -> RunSession:
        if self._session is None:
            raise ConfigError("the run is not open", where="Run", fix="write `with Run(...) as run:`")
        return self._session

    def close_metrics(self, status: str = "success") -> None:
        """Writes out what was logged, and closes the loggers."""
        if self._metrics is not None:
            self._metrics.close()
        while self._loggers:
            self._loggers.pop().finalize(status)

    def say(self, text: str) -> None:
        """Prints a line, on rank 0."""
        if get_rank() == 0:
            print(text, flush=True)


class _RunEnding(Ending):
    """How the run of a script ends for a stop."""

    def __init__(self, run: OpenRun, session: RunSession, guard: StopGuard, context: BuildContext) -> None:
        super().__init__(session, guard, context, rank=get_rank(), step=lambda: run.steps, saves=True, say=run.say)
        self._run = run

    def batches_done(self) -> object:
        """Batches and steps, and where the main thread is: nobody else knows how a user's validation gets on."""
        return self._run.progress(), location_of_thread()

    def copies(self) -> CheckpointCopies | None:
        """Those on an object store."""
        return self._run.copies

    def mark_preempting(self) -> None:
        """Nothing: a logger learns of a stop when it is closed."""

    def close_loggers(self, status: str) -> None:
        """Writes out what was logged."""
        self._run.close_metrics(status)
