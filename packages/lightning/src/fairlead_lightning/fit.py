"""One fit, step by step: plan, join, open the run, build, callbacks, train, finish.

The Trainer takes all of these steps.  The callback comes into a fit that a script's own Trainer has planned, joined and
built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning.pytorch as L
from lightning.pytorch.loggers import Logger
from torch.multiprocessing import ProcessExitedException

from fairlead.backends import build_backend
from fairlead.checks import check_trainer
from fairlead.config import RunConfig, TrainerConfig
from fairlead.findings import raise_errors
from fairlead.interfaces import BuildContext, Extras
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution
from fairlead_distributed.run.joining import join_process_group
from fairlead_distributed.run.loading import readable_load_errors, schedule_errors
from fairlead_distributed.run.opening import handed_over, no_run_handed_over, waiting_handoff
from fairlead_distributed.run.scripts import as_seen
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.lifecycle.monitors import monitor_errors
from fairlead_lightning.lifecycle.stops import StopRequested, Stops
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_lightning.resume.rank_state import saved_positions
from fairlead_runs.metrics_file import METRICS_FILE


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


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """The trainer's own list, which Lightning sets without a declaration."""
    attached: list[L.Callback] = vars(trainer)["callbacks"]
    return attached


def handing_over(session: RunSession, resolution: Resolution) -> AbstractContextManager[None]:
    """Ranks that Lightning starts from this process run the script from its start, and need to know the run."""
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
