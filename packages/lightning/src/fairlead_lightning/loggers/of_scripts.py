"""The CSV and TensorBoard loggers of a script continue in the folder of the last start, cut back to its checkpoint."""

from __future__ import annotations

import csv
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fairlead_lightning.loggers.tensorboard.runtime import NOTHING, EventLogger, known_position

_SHORTENED: Final = ".metrics.csv.cut"
"""A second name of a logger's rows: where a script names the version, Lightning deletes them before any hook."""
_BEGUN_BYTES: Final = 200  # what TensorBoard writes at the head of a file


def continue_loggers(loggers: Iterable[Any], positions: Mapping[str, Any], resume_step: int | None) -> None:
    """Has Lightning's own loggers continue in the folder of the checkpoint's start, with the rows that it had then.

    Lightning has begun the next folder by now, `version_1`: it is left, and removed while there is nothing in it. One
    that the script has written into, or whose version it names, and a user's own kind of logger are left alone.

    Args:
        loggers: The script's.
        positions: Where they stood, by `position_key`; of a checkpoint.
        resume_step: The step that this start resumes from; None: it begins.
    """
    counts = Counter[str]()
    for logger in loggers:
        name = _kinds().get(type(logger))
        if name is None:
            continue
        counts[name] += 1
        position = positions.get(f"{name}-{counts[name]}")
        if resume_step is not None and not _left(logger, position):
            continue
        vars(logger)["position_key"] = f"{name}-{counts[name]}"
        if type(logger) is CSVLogger:
            logger.__class__ = ContinuedCSVLogger
            vars(logger).update(_position=position, _resume_step=resume_step)
        else:
            logger.__class__ = ContinuedEventLogger
            logger.begin(known_position(position) if resume_step is not None else NOTHING, resume_step)
            if resume_step is None:
                vars(logger).update(_rewound=True, _writer=logger._experiment)


def _left(logger: Any, position: Mapping[str, Any] | None) -> bool:
    """Leaves the folder that Lightning has begun for this start, and takes that of the position; whether that is so."""
    if position is None:
        return False
    begun, another = Path(logger.log_dir), position["version"] != logger.version
    if another:
        numbers = isinstance(logger.version, int) and isinstance(position["version"], int)
        written = begun.exists() and any(file.stat().st_size > _BEGUN_BYTES for file in begun.iterdir())
        if not numbers or written:
            return False
    if hasattr(logger._experiment, "close"):
        logger._experiment.close()
    if another:
        shutil.rmtree(begun, ignore_errors=True)
    logger._experiment = None
    logger._version = position["version"]
    return True


def _kinds() -> dict[type, str]:
    """Lightning's loggers that can be cut back here, and how their positions are called."""
    kinds: dict[type, str] = {CSVLogger: "csv-of-script"}
    if find_spec("tensorboard") is not None:  # tensorboardX reads no files
        kinds[TensorBoardLogger] = "tensorboard-of-script"
    return kinds


class ContinuedEventLogger(EventLogger):
    """A script's TensorBoardLogger, whose folder has a number."""

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """As of a job's, with the number of the folder."""
        return {**(super().position() or {}), "version": self.version}


class ContinuedCSVLogger(CSVLogger):
    """A script's CSVLogger: Lightning's deletes the rows that are there."""

    position_key: str
    _position: Mapping[str, Any] | None
    _resume_step: int | None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Lightning's writer, behind the rows that the checkpoint's start had logged."""
        if self._experiment is None:
            header, rows = self._earlier()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                writer: Any = super().experiment
            if header:
                with open(writer.metrics_file_path, "w", newline="", encoding="utf-8") as file:
                    table = csv.DictWriter(file, fieldnames=header)
                    table.writeheader()
                    table.writerows(rows)
                writer.metrics_keys = header
        return self._experiment

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """The number of its folder and of the rows in it, which are on the disk."""
        self.save()
        path = Path(self.experiment.metrics_file_path)
        if not path.exists():
            return {"version": self.version, "rows": 0}
        with path.open(newline="", encoding="utf-8") as file:
            rows = sum(1 for _ in csv.DictReader(file))
            os.fsync(file.fileno())
        _keep(path)
        return {"version": self.version, "rows": rows}

    def _earlier(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The header and the rows to keep."""
        path = Path(self.log_dir, _SHORTENED)
        path = path if path.exists() and self._position is not None else path.with_name("metrics.csv")
        if self._resume_step is None or not path.exists():
            return [], []
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            rows = list(table)
            header = list(table.fieldnames or [])
        if self._position is not None:
            return header, rows[: int(self._position["rows"])]
        return header, [row for row in rows if int(float(row.get("step") or 0)) < self._resume_step]


def _keep(path: Path) -> None:
    """Gives the rows of a logger their second name."""
    shortened = path.with_name(_SHORTENED)
    if shortened.exists() and shortened.samefile(path):
        return
    new = path.with_name(f"{_SHORTENED}.new")
    new.unlink(missing_ok=True)
    try:
        os.link(path, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, new)
    new.replace(shortened)
