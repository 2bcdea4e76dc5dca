"""What one rank does: build the user's model and data, and run Lightning."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import lightning.pytorch as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from fairlead.checks import CheckedJob
from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.errors import ConfigError, FairleadError, RunFailedError
from fairlead.interfaces import BuildContext
from fairlead.user_code import activate
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.run.failure_watch import SpokenForError, note_out_of_memory
from fairlead_distributed.run.joining import join_process_group, tell_of_failure
from fairlead_distributed.run.loading import readable_load_errors
from fairlead_distributed.run.opening import file_to_evaluate
from fairlead_launch.reports import leave_to_rank_0, lost_a_peer, send_report, shown_after_rank_0, watch_supervisor
from fairlead_lightning.checkpoint.rebuilt import build_user_object
from fairlead_lightning.display.quiet import quiet
from fairlead_lightning.lifecycle.failures import described_failure, what_helps
from fairlead_lightning.lifecycle.stops import StopEvaluation
from fairlead_lightning.trainer import Trainer
from fairlead_lightning.verify.plan import Plan
from fairlead_runs.batch_size import for_each_rank
from fairlead_runs.describe import counted
from fairlead_runs.guard import StopGuard

_LOADERS: Final = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def run_rank(arguments: argparse.Namespace, session: Session, checked: CheckedJob, guard: StopGuard) -> int:
    """Runs the command on this rank; an error goes to the supervisor when there is one."""
    watch_supervisor(session.environ)
    root = checked.loaded.root
    activate(root)
    try:
        with quiet(), _stop_codes():
            _run(arguments, session, checked, guard)
    except SpokenForError:
        return RunFailedError.exit_code
    except BaseException as error:
        if isinstance(error, ConfigError) and error.where is not None:
            error.where = checked.loaded.location(error.where)
        ran_out = note_out_of_memory(error)
        text, code = described_failure(error, root)
        if checked.resolution is not None and ran_out:
            text = "\n".join([text, *what_helps(checked.loaded, checked.resolution, session.plugins)])
        if isinstance(error, Exception) and checked.resolution is not None:
            tell_of_failure(checked.resolution, session.environ, text.removeprefix("error: "))
        if session.debug:
            traceback.print_exc()
        if send_report(session.environ, text, code, lost_a_peer=lost_a_peer(error)):
            return code
        if isinstance(error, FairleadError):
            if not session.debug and shown_after_rank_0(error):
                return code
            raise
        if code != 1:
            if text:
                session.warn(text)
            return code
        raise RunFailedError(text) from error
    return 0


def _run(arguments: argparse.Namespace, session: Session, checked: CheckedJob, guard: StopGuard) -> None:
    root = checked.loaded.root
    verifying = Plan.of(session.environ)
    if verifying is not None:
        checked = _without_stops(checked)
    job = cast("JobConfig", checked.loaded.job)
    if job.run.seed is not None:
        L.seed_everything(job.run.seed, workers=True, verbose=False)
    if verifying is not None and verifying.role == "reference":
        _train_reference(verifying, checked, session)
        return
    evaluates = arguments.command != "fit"
    callbacks = [StopEvaluation(guard.flags)] if evaluates else _probes(session.environ, _rank(checked))
    try:
        trainer = Trainer(
            job,
            callbacks=callbacks,
            environ=session.environ,
            plugins=session.plugins,
            root=root,
            guard=guard,
            resolution=checked.resolution,
        )
        shared = for_each_rank(job, trainer.resolution, evaluates=evaluates)
        model = build_user_object(shared.model, root, "model", L.LightningModule)
        data = build_user_object(shared.data, root, "data", L.LightningDataModule) if shared.data is not None else None
        _require_loader(arguments.command, model, data)
    except FairleadError as error:
        resolution = checked.resolution
        if resolution is not None and resolution.topology.launched:
            leave_to_rank_0(error, int(resolution.value("global_rank")))
        raise
    if not evaluates:
        with trainer.fit_callback.stuck.final():
            trainer.fit(model, datamodule=data)
    else:
        _evaluate(arguments, session, job, trainer, model, data)


def _probes(environ: Mapping[str, str], rank: int) -> list[L.Callback]:
    """What a start of `fairlead verify` takes notes with; of no use to any other."""
    verifying = Plan.of(environ)
    if verifying is not None:
        from fairlead_lightning.verify.probe import LayoutProbe
        from fairlead_lightning.verify.standing import write_where_it_stands

        write_where_it_stands(verifying.folder, rank)
        return [LayoutProbe(verifying)]
    return []


def _rank(checked: CheckedJob) -> int:
    return int(checked.resolution.value("global_rank")) if checked.resolution is not None else 0


def _without_stops(checked: CheckedJob) -> CheckedJob:
    """What ends a training early or saves is left out of a verification before it is made."""
    from fairlead_lightning.verify.neutral import without_stops

    return without_stops(checked)


def _train_reference(verifying: Plan, checked: CheckedJob, session: Session) -> None:
    """This start is the one process that a layout is compared with."""
    from fairlead_lightning.verify.one_process import JobBuild
    from fairlead_lightning.verify.verdict import write_verdict

    assert checked.resolution is not None
    assert checked.loaded.job is not None
    context = BuildContext(checked.resolution, session.environ, session.plugins)
    write_verdict(JobBuild(checked.loaded.job, checked.loaded.root, context), verifying)


def _require_loader(command: str, model: L.LightningModule, data: L.LightningDataModule | None) -> None:
    """Raises where nothing says what the command reads; Lightning says so in the middle of its own set-up."""
    name = _LOADERS[command]
    if is_overridden(name, model) or (data is not None and is_overridden(name, data)):
        return
    owner = type(data).__name__ if data is not None else None
    raise ConfigError(
        f"{owner} does not define {name}()" if owner is not None else "the job names no data",
        where="data",
        why=f"`fairlead {command}` needs it, as {type(model).__name__} does not define {name}()",
        fix=f"define {name}() in {owner}"
        if owner is not None
        else "add the class of a LightningDataModule: `data: {class: my_module:MyData}`",
    )


def _evaluate(
    arguments: argparse.Namespace, session: Session, job: JobConfig, trainer: Trainer, model: Any, data: Any
) -> None:
    join_process_group(trainer.resolution, session.environ)
    # Ranks that a scheduler started have looked by themselves, perhaps while another job saved.
    source: str = broadcast_object(job.run.resume)
    checkpoint = file_to_evaluate(source) if source != "never" else None
    given: dict[str, Any] = {"datamodule": data, "ckpt_path": str(checkpoint or "never")}
    if arguments.command == "predict":
        place = Path(session.cwd, arguments.out) if arguments.out else None
        with readable_load_errors(checkpoint):
            predictions = trainer.distributed_predict(model, output_dir=place, **given)
        if predictions is not None and trainer.is_global_zero:
            session.print(f"predictions  {predictions.folder} ({counted(len(predictions), 'sample')})")
        return
    function = trainer.validate if arguments.command == "validate" else trainer.test
    with readable_load_errors(checkpoint):
        results = function(model, verbose=False, **given)
    if trainer.is_global_zero:
        for line in _table(results):
            session.print(line)


def _table(results: Sequence[Mapping[str, float]]) -> Iterator[str]:
    rows = [(name, value) for result in results for name, value in result.items()]
    if not rows:
        yield "no metric was logged (self.log in validation_step or test_step)"
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        yield f"{name:<{width}}  {value:.6g}"


@contextmanager
def _stop_codes() -> Iterator[None]:
    """Lightning ends with exit code 1 on Ctrl-C, and hides that it was one."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise
