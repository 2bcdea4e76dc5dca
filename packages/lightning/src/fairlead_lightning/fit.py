"""One fit, step by step: plan, join, open the run, build, callbacks, train, finish.

The Trainer takes all of these steps.  The callback comes into a fit that a script's own Trainer has planned, joined and
built.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import lightning.pytorch as L
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import Logger
from torch.multiprocessing import ProcessExitedException

from fairlead.backends import build_backend
from fairlead.checks import check_trainer
from fairlead.config import CheckpointConfig, JobConfig, RunConfig, TrainerConfig
from fairlead.findings import Inexact, raise_errors
from fairlead.interfaces import BuildContext, Extras
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution
from fairlead_distributed.run.joining import join_process_group
from fairlead_distributed.run.loading import readable_load_errors, schedule_errors
from fairlead_distributed.run.opening import handed_over, no_run_handed_over, waiting_handoff
from fairlead_distributed.run.scripts import as_seen
from fairlead_distributed.run.session import RunSession
from fairlead_launch.reports import REPORT_FD
from fairlead_lightning import compat
from fairlead_lightning.checkpoint.checkpoints import Checkpoints
from fairlead_lightning.checkpoint.finite import Finite
from fairlead_lightning.checkpoint.replicas import Replicas
from fairlead_lightning.display.model_summary import leave_out_zeros
from fairlead_lightning.display.quiet import only_rank_0_warns
from fairlead_lightning.display.trainjob import TrainJobProgress
from fairlead_lightning.lifecycle.batch_rule import BatchRule
from fairlead_lightning.lifecycle.even_epochs import EvenEpochs
from fairlead_lightning.lifecycle.monitors import Monitors, monitor_errors
from fairlead_lightning.lifecycle.recorder import Recorder
from fairlead_lightning.lifecycle.samples import SameSamples
from fairlead_lightning.lifecycle.stopping import StopRequested
from fairlead_lightning.lifecycle.stops import Stops
from fairlead_lightning.lifecycle.stuck import StuckRanks
from fairlead_lightning.lifecycle.trainable import Trainable
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_lightning.module_reduce import ModuleReduce
from fairlead_lightning.resume.averages import AverageOverRanks
from fairlead_lightning.resume.exact_resume import ExactResume
from fairlead_lightning.resume.rank_state import saved_positions
from fairlead_runs.batch_size import global_batch
from fairlead_runs.guard import StopGuard
from fairlead_runs.lasting_output import give_output_back, keep_output
from fairlead_runs.metrics_file import METRICS_FILE
from fairlead_runs.trainjob import StatusServer


def plan(
    config: TrainerConfig, *, environ: Mapping[str, str], plugins: PluginManager, run: RunConfig | None = None
) -> Resolution:
    """Every decision of a run that is about to start here, or all that is wrong with it in one `ConfigError`."""
    resolution, findings = check_trainer(config, environ=environ, plugins=plugins, run=run, purpose="run")
    raise_errors(findings)
    return resolution


def as_seen_by(engine: L.Trainer, resolution: Resolution, config: TrainerConfig) -> Resolution:
    """The resolution of this machine, corrected to what a script's own Trainer has decided."""
    own = ("world_size", "global_rank", "local_rank", "node_rank")
    seen = {
        **{name: getattr(engine, name) for name in own},
        "num_nodes": int(getattr(engine.strategy, "num_nodes", 1)),
        "strategy": type(engine.strategy).__name__,
        "precision": str(engine.precision),
        "accelerator": type(engine.accelerator).__name__,
    }
    by = type(engine).__name__
    return as_seen(resolution, seen, config, by=by, connect=f"set {by}(devices={{devices}}{{nodes}})")


def trains_here(resolution: Resolution) -> bool:
    """Whether this process is one of the ranks; with `ddp_spawn` it only waits for them."""
    return getattr(resolution.strategy, "start_method", "popen") == "popen"


def starts_ranks(resolution: Resolution) -> bool:
    """Whether Lightning is to start the other ranks, each running this script from its first line."""
    return trains_here(resolution) and not resolution.topology.launched and resolution.world_size > 1


def join_ranks(resolution: Resolution, environ: Mapping[str, str], config_hash: str | None = None) -> None:
    """The ranks that a launcher started meet, unless Lightning starts them and they meet there."""
    if waiting_handoff(environ) is None:
        join_process_group(resolution, environ, config_hash=config_hash)
    if starts_ranks(resolution):
        no_run_handed_over(environ)


def metrics_file(session: RunSession) -> MetricsLogger:
    """The run's own record, cut back to the checkpoint that this start resumes from."""
    position = saved_positions(session).get(METRICS_FILE)
    return MetricsLogger(session.path, resume_step=session.resume_step, position=position, fence=session.fence)


def run_loggers(session: RunSession, context: BuildContext) -> list[Logger]:
    """The run's own record, and the loggers of the config."""
    extras: Extras = {
        "resumed": session.resumed,
        "resume_step": session.resume_step,
        "logger_positions": saved_positions(session),
        "run_name": session.path.name,
    }
    context = dataclasses.replace(context, run_dir=session.path, extras=extras)
    # `csv` builds nothing: the run's own file is that logger.
    built = (build_backend(logger, context) for logger in context.resolution.loggers)
    return [metrics_file(session), *filter(None, built)]


class FitParts:
    """The callbacks that Fairlead adds to a Lightning Trainer: made once, attached to one fit after another."""

    def __init__(
        self,
        context: BuildContext,
        *,
        say: Callable[[str], None] | None = None,
        seed: int | None = None,
        inexact: Sequence[Inexact] | None = None,
        guard: StopGuard | None = None,
        job: JobConfig | None = None,
    ) -> None:
        resolution, environ = context.resolution, context.environ
        self.averages = AverageOverRanks()
        self.exact = ExactResume(seed, environ=environ, settings=inexact, say=say)
        self.batch = BatchRule(resolution, say, global_batch(job, resolution.trainer))
        self.always: list[L.Callback] = [ModuleReduce(), self.batch]
        self.trainable = Trainable(self.exact.reduce_in_order)
        self.samples = SameSamples(resolution.trainer.check_samples, say)
        self.finite = Finite(resolution.trainer.max_non_finite, say)
        watch = resolution.trainer
        self.replicas = Replicas(watch.on_divergence, watch.check_divergence_every_n_steps, watch.local_buffers)
        self.even = EvenEpochs(say)
        self.stuck = StuckRanks(environ, timeout=getattr(resolution.strategy, "timeout", None))
        self.stops = Stops(context, say, guard)
        server = StatusServer.of(environ)
        self._trainjob = TrainJobProgress(server, say) if server is not None else None
        self._resolution = resolution
        self._say = say
        self._loggers: list[Logger] = []
        self._hides = False
        self._logged = REPORT_FD in environ  # other ranks than the first write into a file of their own each
        self._undo: list[Callable[[], None]] = []

    def attach(
        self,
        trainer: L.Trainer,
        session: RunSession,
        checkpoint: CheckpointConfig | None,
        loggers: Sequence[Logger] = (),
    ) -> list[L.Callback]:
        """A fit of this run begins: gives the trainer what belongs to it, and returns the callbacks among that.

        A stop is carried out last, when all others have had their say. A finished run gets nothing that records.
        """
        keep_output()
        saves = []
        if checkpoint is not None:
            saves = [Checkpoints(checkpoint, session, self.exact, self.finite, self.replicas)]
        writes = saves[0] if saves else None
        first: list[L.Callback] = [self.averages, self.exact, *self.always]
        records: list[L.Callback] = []
        if session.finished is None:
            first += [self.even, self.samples, self.finite, self.trainable, self.replicas]
            for part in (self.even, self.samples, self.finite, self.replicas):
                part.begin(session)
            here = trains_here(self._resolution)
            self.stuck.begin(trainer, session, here=here)
            self.stops.begin(trainer, session, writes, here=here)
            told = [self._trainjob] if self._trainjob is not None else []
            monitors = Monitors(checkpoint, session, self._say)
            records = [monitors, Recorder(session, self.stops), *told, self.stuck, self.stops]
        self.batch.begin(session)
        self.exact.begin(session, writes, self.stops if records else None)
        last = [*saves, *records]
        if session.resumed:  # its first start has given Lightning's advice
            self._hides = _ADVICE not in warnings.filters
            warnings.simplefilter("ignore", PossibleUserWarning)
        if trainer.global_rank > 0 and not self._logged:
            self._undo.append(only_rank_0_warns())
        self._undo.append(compat.less_overhead(trainer))
        leave_out_zeros(callbacks_of(trainer))
        others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, _PARTS)]
        vars(trainer)["callbacks"] = [*first, *others, *last]
        self._loggers = list(loggers)
        trainer.loggers = [*trainer.loggers, *loggers]
        return [*first, *last]

    def finalize(self) -> None:
        """Closes the run's loggers, before they are detached."""
        for logger in self._loggers:
            logger.finalize("success")

    def detach(self, trainer: L.Trainer, *, keep: tuple[type[L.Callback], ...] = ()) -> None:
        """The fit is over: what comes after it writes nothing into the run directory; some parts may stay for it."""
        self.stops.end()
        self.exact.end()
        if self._hides:
            warnings.filters = [one for one in warnings.filters if one != _ADVICE]
            self._hides = False
        while self._undo:
            self._undo.pop()()
        give_output_back()
        gone = tuple(part for part in _PARTS if part not in keep)
        vars(trainer)["callbacks"] = [c for c in callbacks_of(trainer) if not isinstance(c, gone)]
        trainer.loggers = [logger for logger in trainer.loggers if logger not in self._loggers]


_WATCH: Final = (EvenEpochs, Finite, Monitors, Replicas, SameSamples, StuckRanks, Trainable)
_PARTS: Final = (
    AverageOverRanks,
    ExactResume,
    ModuleReduce,
    BatchRule,
    *_WATCH,
    Checkpoints,
    Recorder,
    TrainJobProgress,
    Stops,
)


_ADVICE: Final = ("ignore", None, PossibleUserWarning, None, 0)
"""What `warnings.simplefilter` makes for Lightning's advice."""


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """The trainer's own list, which Lightning sets without a declaration."""
    attached: list[L.Callback] = vars(trainer)["callbacks"]
    return attached


def handing_over(session: RunSession, resolution: Resolution) -> AbstractContextManager[None]:
    """Ranks that Lightning starts from this process run the script again, and have to be told of the run."""
    return handed_over(session) if starts_ranks(resolution) else nullcontext()


@contextmanager
def training(trainer: L.Trainer, session: RunSession, resolution: Resolution, stops: Stops) -> Iterator[None]:
    """Around Lightning's `fit`, which may start ranks; with `ddp_spawn`, what they end with is raised here."""
    handing, loading = handing_over(session, resolution), readable_load_errors(session.checkpoint)
    with handing, loading, schedule_errors(), monitor_errors():
        if not trains_here(resolution):
            stops.pass_on(trainer)
        try:
            yield
        except ProcessExitedException as ended:
            code = session.children_stopped(ended)
            if code is None:
                raise
            raise StopRequested(code) from ended
