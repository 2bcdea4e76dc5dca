"""Builds Lightning's logger for Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import math
import netrc
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import wandb
from fairlead.errors import RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.again import PENDING, LoggedBefore, pending_rows, plain_rows
from fairlead_lightning.loggers.preempting import answers, forget_service
from fairlead_lightning.loggers.wandb import WandbLoggerConfig
from fairlead_lightning.loggers.wandb_record import STEP, RecordFile, earlier_rows
from fairlead_runs.commit import atomic_write
from fairlead_runs.logger_positions import resume_position

RUN_FILE: Final = "wandb-run.json"
SERVER: Final = "https://api.wandb.ai"
TIMEOUT_S: Final = 3.0
FLUSH: Final = "x_transaction_log_flush_interval"
"""The setting of wandb 0.31 and later that says how often its record is written, in seconds."""
_MANY: Final = 1000  # rows, after which it is looked up which of them W&B has written


class RunLogger(WandbLogger):
    """Lightning's logger, with each step once however often the run was started; offline with a `reason`.

    What an earlier start has logged is not logged once more, and a checkpoint keeps the rows that W&B has not written
    by then.  Rows that your own code logs with `wandb.log` are not known here.  A scheduler's SIGTERM ends W&B's own
    process at once (`gone`): what is logged from then on is in the checkpoint of the stop.
    """

    position_key: ClassVar[str] = "wandb"

    def __init__(
        self, reason: str | None, *, position: Mapping[str, Any] | None, resume_step: int | None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.reason = reason
        self._mode: str = arguments["mode"]
        self._pending = pending_rows(position)
        self._resume_step = resume_step or 0
        self._record: RecordFile | None = None
        self._before = LoggedBefore()
        self._logged = 0
        self._number = int(position.get("number", 0)) if position is not None else 0
        self._unseen = 0
        self.gone = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run at W&B; what this start must not log again is found out when it is first asked for."""
        run = super().experiment
        if self._record is None and self._mode != "disabled":
            self._record = RecordFile(Path(run.dir).parent / f"run-{run.id}.wandb")
            self._go_on(run)
        return run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As Lightning's, without what an earlier start has logged for this step."""
        run = self.experiment
        values = self._before.without(step, {self._named(name): value for name, value in metrics.items()})
        if values and self._unseen:
            self._unseen -= 1
        elif values:
            self._log(run, step, values)

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """How much was logged, and the rows of it that W&B has not written yet; what it has written is on the disk."""
        self._drop_written()
        if self._record is not None:
            self._record.make_durable()
        if self._mode == "online" and not self.gone:
            try:
                self._number = self.experiment.step
            except Exception:
                if not self._has_gone(self.experiment):
                    raise
        return {"logged": self._logged, "number": self._number, PENDING: plain_rows(self._pending)}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends as Lightning's logger does; offline, says where the record is, and at the end how to upload it."""
        run = self._experiment
        if run is not None and self._mode != "disabled" and self._has_gone(run) and status == "success":
            # It was not the end of the job, and no other start will log what is left.
            self.gone, self._record, self._experiment, wandb.run = False, None, None, None
            run = self.experiment
        if not self.gone:
            super().finalize(status)
        if self.reason is not None and run is not None and getattr(run, "dir", None):
            folder = Path(run.dir).parent  # `dir` is the `files` in it
            # One for each start. Without WANDB_RESUME the rows of the second would take the place of the first's.
            files = folder.parent.glob(f"offline-run-*-{run.id}/run-{run.id}.wandb")
            folders = sorted(file.parent for file in files) or [folder]
            command = shlex.join(["wandb", "sync", *map(str, folders)])
            upload = f"; to upload:\n  WANDB_RESUME=allow {command}" if status == "success" else f" in {folder.parent}"
            print(f"W&B: recorded offline ({self.reason}){upload}")

    def _go_on(self, run: Any) -> None:
        """Logs what is missing of earlier starts, and notes what is not to be logged again."""
        assert self._record is not None
        pending, self._pending = self._pending, []
        rows = earlier_rows(Path(str(self.save_dir)), run.id, but=self._record.path)
        count = max((row.number + 1 for row in rows), default=0)
        delivered: float = math.inf
        if self._mode == "online":
            delivered = run.starting_step  # the server has so many rows, some of them perhaps not in our files
            self._unseen = max(0, run.starting_step - max(count, self._number))
        elif rows:
            run.log({}, step=count)  # W&B's own count of rows goes on
        there = LoggedBefore((row.step, row.values) for row in rows if row.step is not None and row.number < delivered)
        for step, values in [*((row.step, row.values) for row in rows if row.step is not None), *pending]:
            lacking = there.without(step, values)
            if lacking:
                self._log(run, step, lacking)
                there.add(step, lacking)
        there.forget(before=self._resume_step - 1)  # a validation that follows the save is logged for the step before
        self._before = there

    def _log(self, run: Any, step: int | None, values: dict[str, Any]) -> None:
        try:
            if not self.gone:
                run.log(values if step is None else {**values, STEP: step})
        except Exception:
            if not self._has_gone(run):
                raise
        self._logged += 1
        if step is not None:
            self._pending.append((step, values))
            if len(self._pending) % _MANY == 0:
                self._drop_written()

    def _has_gone(self, run: Any) -> bool:
        """Whether W&B's process has ended before ours."""
        if not self.gone and not answers(run):
            self.gone = True
            forget_service()
        return self.gone

    def _drop_written(self) -> None:
        """Forgets the rows that are in W&B's file by now; it has them in the order in which they were logged."""
        if self._record is None or not self._pending:
            return
        written = LoggedBefore((row.step, row.values) for row in self._record.rows() if row.step is not None)
        self._pending = [(step, values) for step, values in self._pending if written.without(step, values)]

    def _named(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name


def build(config: WandbLoggerConfig, context: BuildContext) -> RunLogger:
    """The logger, with the run's id; only rank 0 looks for the network and writes."""
    run_dir = context.run_dir or Path()
    first = int(getattr(rank_zero_only, "rank", 0)) == 0
    mode, reason = wandb_mode(config.offline, context.environ) if first else ("disabled", "rank 0 logs")
    identity = run_id(run_dir) if context.run_dir is not None else None
    if first and identity is not None and not (run_dir / RUN_FILE).exists():
        content = json.dumps({"id": identity}) + "\n"
        atomic_write(run_dir / RUN_FILE, content.encode(), error=RunDirectoryError)
    settings: dict[str, Any] = {}
    if FLUSH in wandb.Settings.model_fields and f"WANDB_{FLUSH.upper()}" not in context.environ:
        settings["settings"] = wandb.Settings(**{FLUSH: 1.0})  # it takes 15 seconds by itself
    return RunLogger(
        reason if mode == "offline" else None,
        position=resume_position(context.extras, RunLogger.position_key),
        resume_step=context.extras.get("resume_step"),
        name=config.run_name or context.extras.get("run_name"),
        save_dir=run_dir,
        id=identity,
        project=config.project or context.environ.get("WANDB_PROJECT"),
        prefix=config.prefix,
        mode=mode,
        resume="allow" if mode == "online" else None,
        entity=config.entity,
        group=config.group,
        tags=list(config.tags) or None,
        notes=config.notes,
        job_type=config.job_type,
        **settings,
    )


def run_id(run_dir: Path) -> str:
    """The id of this run at W&B: the one in `wandb-run.json`, else made from its path and its history's first line.

    So every rank and every start computes the same, and a new run at the path of a deleted one gets another.
    """
    stored = run_dir / RUN_FILE
    try:
        return str(json.loads(stored.read_text())["id"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{RUN_FILE} is damaged",
            where=str(stored),
            why=f"{type(error).__name__}: {error}",
            fix='delete it for a new run at W&B, or write {"id": "..."} with the run\'s id from its page there',
        ) from error
    digest = hashlib.sha256(str(run_dir.absolute()).encode())
    try:
        with (run_dir / "history.jsonl").open("rb") as history:
            digest.update(history.readline())
    except FileNotFoundError:
        pass  # a loop without a history: the path alone
    return digest.hexdigest()[:16]


def wandb_mode(asked: bool | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """(`online`, `offline` or `disabled`, the reason), from the config's `offline` and the environment."""
    if asked is not None:
        return ("offline" if asked else "online"), "trainer.loggers: offline"
    mode = environ.get("WANDB_MODE", "").lower()
    if mode:
        known = {"dryrun": "offline", "run": "online", "online": "online", "disabled": "disabled"}
        return known.get(mode, "offline"), f"WANDB_MODE={mode}"
    server = environ.get("WANDB_BASE_URL", SERVER)
    if not _has_login(environ, urlsplit(server).hostname or ""):
        return "offline", "no WANDB_API_KEY, and no login in ~/.netrc"
    if not can_connect(server, environ):
        return "offline", f"{server} does not answer"
    return "online", f"{server} answers"


def _has_login(environ: Mapping[str, str], host: str) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environ.get("HOME", "/nonexistent"))
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue  # wandb cannot log in with it either
    return False


def can_connect(server: str, environ: Mapping[str, str]) -> bool:
    """Whether a TCP connection to the server, or to the proxy before it, opens within three seconds."""
    proxy = environ.get("HTTPS_PROXY") or environ.get("https_proxy")
    url = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}" if proxy else server)
    port = url.port or (443 if url.scheme in {"https", ""} else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True
