"""What one rank does: build the user's model and data, and run Lightning."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as L

from fairlead.checks import CheckedJob
from fairlead.cli.session import Session
from fairlead.config import ClassSpec, JobConfig
from fairlead.errors import FairleadError, RunFailedError, UserCodeError
from fairlead.modules import CodeRoot, activate, instantiate
from fairlead_lightning.failures import described_failure
from fairlead_lightning.quiet import quiet
from fairlead_lightning.session import checkpoint_to_evaluate
from fairlead_lightning.supervise import send_report, watch_supervisor
from fairlead_lightning.trainer import Trainer

__all__ = ["run_rank"]


def run_rank(arguments: argparse.Namespace, session: Session, checked: CheckedJob) -> int:
    """Runs the command on this rank; an error goes to the supervisor when there is one."""
    watch_supervisor(session.environ)
    root = checked.loaded.root
    activate(root)
    try:
        with quiet(), _stop_codes():
            return _run(arguments, session, checked)
    except BaseException as error:
        if session.debug:
            traceback.print_exc()
        text, code = described_failure(error, root)
        if not send_report(session.environ, text, code):
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                raise
            if isinstance(error, FairleadError):
                raise
            raise RunFailedError(text) from error
        return code


def _run(arguments: argparse.Namespace, session: Session, checked: CheckedJob) -> int:
    job = cast("JobConfig", checked.loaded.job)
    root = checked.loaded.root
    L.seed_everything(job.run.seed, workers=True, verbose=False) if job.run.seed is not None else None
    trainer = Trainer(job, environ=session.environ, plugins=session.plugins, root=root)
    model = _built(job.model, root, "model", L.LightningModule)
    data = _built(job.data, root, "data", L.LightningDataModule) if job.data is not None else None
    if arguments.command == "fit":
        trainer.fit(model, datamodule=data)
        return 0
    checkpoint = checkpoint_to_evaluate(job, session.environ, session.cwd, arguments.resume)
    function: Callable[..., Any] = getattr(trainer, arguments.command)
    results = function(model, datamodule=data, ckpt_path=str(checkpoint) if checkpoint else None)
    del results
    return 0


def _built(spec: ClassSpec, root: CodeRoot, where: str, expected: type) -> Any:
    """The user's object, of the class that Lightning needs."""
    thing = instantiate({"class": spec.class_, "args": spec.args}, root, path=(where,))
    if not isinstance(thing, expected):
        raise UserCodeError(
            f"{spec.class_} made a {type(thing).__name__}, not a lightning.pytorch.{expected.__name__}",
            where=where,
            fix="derive it from that class (from lightning.pytorch, not from pytorch_lightning)",
        )
    return thing


@contextmanager
def _stop_codes() -> Iterator[None]:
    """Gives a stop by a signal the exit code of CLI.md; Lightning ends with 1 or with none."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise SystemExit(130) from error
        raise

