"""Lightning's logger for MLflow, with one run for all starts and each step once."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from mlflow.exceptions import MlflowException

from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.mlflow import MLflowLoggerConfig
from fairlead_runs.commit import atomic_write
from fairlead_runs.logger_positions import PENDING, pending_rows, plain_rows, resume_position

RUN_FILE: Final = "mlflow-run.json"
_STATUS: Final = {
    "finished": "KILLED",
    "failed": "FAILED",
}  # Lightning passes `finished` at a stop: the run may continue
_REFUSED: Final = "INVALID_PARAMETER_VALUE"
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_/. -]+")  # Lightning leaves them out, as MLflow would refuse them


class RunLogger(MLFlowLogger):
    """Lightning's logger; what MLflow has from an earlier start is not logged once more.

    A server that does not answer is a warning: the rows are retained, in checkpoints too, and sent later.
    """

    position_key: ClassVar[str] = "mlflow"

    def __init__(self, run_file: Path | None, *, position: Mapping[str, Any] | None, **arguments: Any) -> None:
        stored = _stored_id(run_file)
        super().__init__(run_id=stored, **arguments)
        self._run_file = run_file
        self._resumes = stored is not None
        self._opened = False
        self._waiting = [(step, dict(values)) for step, values in pending_rows(position)]
        self._there: dict[str, set[int]] = {}
        self._epoch: tuple[int, Any] | None = None
        self._logged = 0
        self._warned = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `MlflowClient`; the run is created or continued at the first access."""
        if not self._opened:
            self._open()
        return super().experiment

    @property
    def name(self) -> str:
        """The name of the experiment; Lightning's asks the server for its id."""
        return self._experiment_name

    @property
    def version(self) -> str:
        """The id of the run, as far as it is known."""
        return self._run_id or ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """As Lightning's; MLflow keeps the first value of each, and one that has changed since is a warning."""
        try:
            super().log_hyperparams(params)
        except (MlflowException, OSError) as error:
            rank_zero_warn(f"MLflow does not take the hyperparameters, and keeps the first value of each: {error}")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As Lightning's, without what MLflow has for this step."""
        step = step or 0
        values = dict(metrics)
        if self._epoch == (step, values.get("epoch")):
            values.pop("epoch", None)  # Lightning adds it whenever it logs
        self._epoch = (step, values.get("epoch", metrics.get("epoch")))
        self._waiting.append((step, values))
        self._logged += 1
        with self._warning():
            self._send()

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """How much was logged, and the rows of it that MLflow has not taken yet."""
        with self._warning():
            self._send()
        return {"logged": self._logged, PENDING: plain_rows(self._waiting)}

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Sends what waits, and says how the run has ended: FINISHED, FAILED, or KILLED by a stop."""
        if not self._opened and not self._waiting:
            return
        with self._warning():
            self._send()
            self.experiment.set_terminated(self._run_id, _STATUS.get(status, "FINISHED"))
        if self._waiting:
            rank_zero_warn(f"MLflow lacks {len(self._waiting)} rows that it did not take; metrics.csv has them")

    def _open(self) -> None:
        try:
            client = super().experiment
            if self._resumes:
                client.update_run(self._run_id, status="RUNNING")
        except (MlflowException, OSError) as error:
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                raise RunDirectoryError(
                    f"MLflow does not know the run {self._run_id}",
                    where=str(self._run_file or self._tracking_uri),
                    why=str(error),
                    fix=f"give the tracking_uri of its first start, or delete {RUN_FILE} for a new run there",
                ) from error
            if self._resumes:
                raise  # a warning: what is logged waits
            raise RunDirectoryError(
                "MLflow cannot be reached, and the run has not begun there",
                where=self._tracking_uri,
                why=str(error),
                fix="look at trainer.loggers' tracking_uri, or MLFLOW_TRACKING_URI; without both, files are written",
            ) from error
        self._opened = True
        if not self._resumes and self._run_file is not None:
            content = json.dumps({"id": self._run_id}) + "\n"
            atomic_write(self._run_file, content.encode(), error=RunDirectoryError)

    def _send(self) -> None:
        while self._waiting:
            step, values = self._waiting[0]
            new = {name: value for name, value in values.items() if step not in self._steps_of(name)}
            try:
                if new:
                    super().log_metrics(new, step)
            except MlflowException as error:
                if error.error_code == _REFUSED:
                    del self._waiting[0]  # it would be refused for ever, and hold up what follows
                raise
            del self._waiting[0]

    def _steps_of(self, name: str) -> set[int]:
        """The steps that MLflow has of a metric from earlier starts."""
        if not self._resumes:
            return set()
        if name not in self._there:
            named = f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name
            history = self.experiment.get_metric_history(self._run_id, _NOT_IN_NAMES.sub("", named))
            self._there[name] = {metric.step for metric in history}
        return self._there[name]

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (MlflowException, OSError) as error:
            if getattr(error, "error_code", None) == _REFUSED:
                raise
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"MLflow does not accept what is logged: {error}; training continues, it will be retried"
                )


def build(config: MLflowLoggerConfig, context: BuildContext) -> RunLogger | DummyLogger:
    """The logger of rank 0, with the run's id; the other ranks open nothing."""
    if int(getattr(rank_zero_only, "rank", 0)) != 0:
        return DummyLogger()
    run_dir = context.run_dir or Path()
    uri = config.tracking_uri or context.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        uri = f"file:{run_dir.absolute()}/mlruns"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 asks for it, and reads nothing else
    try:
        return RunLogger(
            run_dir / RUN_FILE if context.run_dir is not None else None,
            position=resume_position(context.extras, RunLogger.position_key),
            experiment_name=config.experiment or context.environ.get("MLFLOW_EXPERIMENT_NAME") or "lightning_logs",
            run_name=config.run_name or context.extras.get("run_name"),
            tracking_uri=uri,
            tags=dict(config.tags) or None,
            prefix=config.prefix,
        )
    except MlflowException as error:
        raise ConfigError(
            f"MLflow cannot log to {uri!r}",
            where="trainer.loggers: tracking_uri, or MLFLOW_TRACKING_URI",
            why=str(error).strip(),
            fix="give the address of a server, or nothing for files in the run directory; a database needs "
            "`pip install mlflow`, the full package",
        ) from error


def _stored_id(run_file: Path | None) -> str | None:
    """The id in `mlflow-run.json`; None: the run begins there."""
    if run_file is None:
        return None
    try:
        return str(json.loads(run_file.read_text())["id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{RUN_FILE} is damaged",
            where=str(run_file),
            why=f"{type(error).__name__}: {error}",
            fix='delete it for a new run in MLflow, or write {"id": "..."} with the run\'s id from its page there',
        ) from error
