"""Lightning's TensorBoard logger, with event files that hold each step once."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from fairlead.errors import RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.tensorboard import TensorBoardLoggerConfig
from fairlead_lightning.loggers.tensorboard.events import cut_steps, cut_to, event_files, make_durable
from fairlead_runs.logger_positions import resume_position

POSITION_KEY: Final = "tensorboard"
NOTHING: Final[Mapping[str, Any]] = {"files": {}, "hyperparameters": [], "epoch": None}


class EventLogger(TensorBoardLogger):
    """Lightning's logger; before it writes, rank 0 cuts the files back to where the run resumes.

    That is `position`, else before `resume_step`.  A disk that refuses to write is a warning; the training continues.
    """

    position_key: ClassVar[str] = POSITION_KEY

    def __init__(self, *, position: Mapping[str, Any] | None, resume_step: int | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.begin(position, resume_step)

    def begin(self, position: Mapping[str, Any] | None, resume_step: int | None) -> None:
        """What it knows before it has written anything."""
        self._position = position
        self._resume_step = resume_step
        self._known: set[str] = set()
        self._hyperparameters: set[str] = set()
        self._epoch: list[float] | None = None
        self._rewound = False
        self._writer: Any = None
        self._durable: dict[str, int] = {}
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks open their own files."""
        return {**super().__getstate__(), "_writer": None}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's `SummaryWriter`; its file begins at the first access."""
        self._rewind()
        self._writer = super().experiment
        return self._writer

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """Where the files stand (sizes, digests of hyperparameters, the last epoch); what was logged is on the disk."""
        self._rewind()
        folder = Path(self.log_dir)
        try:
            if self._writer is not None:
                self._writer.flush()
            files = event_files(folder)
            make_durable(folder, [name for name, size in files.items() if self._durable.get(name) != size])
        except Exception as error:  # TensorFlow's files, which are used where it is installed, raise their own errors
            raise RunDirectoryError("cannot write TensorBoard's events", where=str(folder), why=str(error)) from error
        self._durable = files
        return {"files": files, "hyperparameters": sorted(self._hyperparameters), "epoch": self._epoch}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As Lightning's, which adds the epoch whenever it logs: of one step, it is written once."""
        self._rewind()
        if step is not None and "epoch" in metrics:
            epoch = [step, float(metrics["epoch"])]
            if epoch == self._epoch:
                metrics = {name: value for name, value in metrics.items() if name != "epoch"}
            self._epoch = epoch
        with self._warning():
            super().log_metrics(metrics, step)

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """As Lightning's; what an earlier start has logged in the same words is not written once more."""
        self._rewind()
        plain = vars(params) if isinstance(params, Namespace) else params
        text = repr([sorted((str(key), str(value)) for key, value in plain.items()), str(metrics), step])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest in self._known:
            metrics = {}  # then they only go into hparams.yaml
        with self._warning():
            super().log_hyperparams(params, metrics, step)
            self._hyperparameters.add(digest)

    @rank_zero_only
    def save(self) -> None:
        """As Lightning's."""
        with self._warning():
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """As Lightning's."""
        with self._warning():
            super().finalize(status)

    def _rewind(self) -> None:
        """Cuts the files back; once, and before this start writes into the folder."""
        if self._rewound:
            return
        self._rewound = True
        folder = Path(self.log_dir)
        with self._warning():
            found = event_files(folder)
            position = self._position
            if position is not None and found and position["files"] and found.keys().isdisjoint(position["files"]):
                position = None  # of another folder: it says nothing about these files
            if position is not None:
                short = cut_to(folder, position["files"])
                if short:
                    rank_zero_warn(f"{folder}: points before the checkpoint are missing in {', '.join(short)}")
                else:
                    self._known = set(position["hyperparameters"])
                    self._hyperparameters = set(self._known)
                    self._epoch = position["epoch"]
            elif self._resume_step is not None:
                cut_steps(folder, self._resume_step)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RunDirectoryError) as error:
            cause = error.__cause__ if isinstance(error, (ValueError, RunDirectoryError)) else error
            if not isinstance(cause, OSError):  # Lightning says ValueError of whatever it cannot log
                raise
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"TensorBoard's events cannot be written: {cause} ({self.log_dir}); training continues"
                    " without them, metrics.csv has them"
                )


def build(config: TensorBoardLoggerConfig, context: BuildContext) -> EventLogger:
    """The logger, in `tensorboard/` of the run directory; it continues as the context's extras say.

    A `resume_step` of None in them begins anew; without one nothing is cut.
    """
    resume_step = context.extras.get("resume_step")
    position = known_position(resume_position(context.extras, POSITION_KEY)) if resume_step is not None else None
    if resume_step is None and "resume_step" in context.extras:
        position = NOTHING
    further: dict[str, Any] = {"flush_secs": config.flush_secs}
    if resume_step is not None and position is None:
        further["purge_step"] = resume_step  # hides, at least, what a disk would not let us cut
    return EventLogger(
        position=position,
        resume_step=resume_step,
        save_dir=(context.run_dir or Path()) / "tensorboard",
        name="",
        version="",  # no folder per start
        log_graph=config.log_graph,
        default_hp_metric=config.default_hp_metric,
        prefix=config.prefix,
        **further,
    )


def known_position(position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """None where there is none, or one of another version of Fairlead: then the step decides."""
    if position is None:
        return None
    try:
        files = {str(name): int(size) for name, size in position["files"].items()}
        epoch = [float(number) for number in position["epoch"]] if position["epoch"] is not None else None
        return {"files": files, "hyperparameters": list(map(str, position["hyperparameters"])), "epoch": epoch}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
