"""Builds Lightning's logger for Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import netrc
import shlex
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from fairlead.errors import RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.preempting import answers, forget_service
from fairlead_lightning.loggers.wandb import WandbLoggerConfig
from fairlead_runs.commit import atomic_write
from fairlead_runs.logger_positions import PENDING, pending_rows, plain_rows, resume_position

RUN_FILE: Final = "wandb-run.json"
SERVER: Final = "https://api.wandb.ai"
STEP: Final = "trainer/global_step"
"""The column in which Lightning puts its step; W&B's own `_step` counts rows."""
TIMEOUT_S: Final = 3.0
FLUSH: Final = "x_transaction_log_flush_interval"
"""The setting of wandb 0.31 and later that says how often its record is written, in seconds."""
_WRITTEN_AFTER_S: Final = 2.0  # a row is in W&B's record then: it is flushed each second
_RECENT: Final = 1000  # rows in a checkpoint: more than W&B has under way, unless its server was away


class RunLogger(WandbLogger):
    """Lightning's logger, with each step once however often the run was started; offline with a `reason`.

    Rows are counted as W&B counts them. A run that is resumed has so many rows at W&B: if more than at the checkpoint,
    the first rows of this start are there already; if fewer, the missing ones are logged from the checkpoint.
    Offline this is known of a start that has ended. After a kill a row is rather recorded twice than not at all.

    Rows that your own code logs with `wandb.log` are not known here.  A scheduler's SIGTERM ends W&B's own process at
    once (`gone`): what it had not written, and what is logged from then on, is in the checkpoint of the stop.
    """

    position_key: ClassVar[str] = "wandb"

    def __init__(
        self, reason: str | None, *, run_file: Path | None, position: Mapping[str, Any] | None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.reason = reason
        self.gone = False
        self._mode: str = arguments["mode"]
        self._run_file = run_file
        self._opened = False
        self._count = int((position or {}).get("number", 0))
        self._recent = deque(((0.0, *row) for row in pending_rows(position)), _RECENT)
        self._answered = 0.0  # when W&B's process was seen to be there
        self._step = -1
        self._repeated = 0
        self._repeated_to = -1

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run at W&B; which rows it has of earlier starts is looked up at the first access."""
        run = super().experiment
        if not self._opened and self._mode != "disabled":
            self._opened = True
            self._resume(run)
        return run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As Lightning's, without what an earlier start has logged for this step."""
        run = self.experiment
        if self._repeated and step is not None and step <= self._repeated_to:
            self._repeated -= 1
            return
        self._repeated = 0
        self._log(run, step, {self._named(name): value for name, value in metrics.items()})

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """How many rows were logged, and the last of them: the server, or the record on disk, may not get those."""
        if self._mode != "disabled" and self._opened and not self.gone:
            try:
                self._count, self._answered = self.experiment.step, time.monotonic()
            except Exception:
                if not self._has_gone(self.experiment):
                    raise
        rows = self._last(self._at_risk() if self._mode == "offline" else _RECENT)
        return {"number": self._count - self._repeated, PENDING: plain_rows(rows)}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends as Lightning's logger does; offline, says where the record is, and at the end how to upload it."""
        run = self._experiment
        if run is not None and self._mode != "disabled" and self._has_gone(run) and status == "success":
            # It was not the end of the job, and no other start will log what is left.
            self._note_end()
            self.gone, self._opened, self._experiment, wandb.run = False, False, None, None
            run = self.experiment
        if not self.gone:
            super().finalize(status)
        if self.reason is not None and run is not None and getattr(run, "dir", None):
            self._note_end()
            folder = Path(run.dir).parent.parent  # `dir` is the `files` in the folder of this start
            # One for each start. Without WANDB_RESUME the rows of the second would replace the first's.
            folders = f"{shlex.quote(str(folder))}/offline-run-*-{run.id}"
            command = f'for run in {folders}; do WANDB_RESUME=allow wandb sync "$run"; done'
            upload = f"; to upload:\n  {command}" if status == "success" else f" in {folder}"
            print(f"W&B: recorded offline ({self.reason}){upload}")

    def _resume(self, run: Any) -> None:
        """Logs what W&B lacks of earlier starts, and notes how many rows of this one it has already."""
        if self._mode == "online":
            stored, self._repeated_to = run.starting_step, int(run.summary.get(STEP, -1))
        else:
            stored, self._repeated_to = self._recorded(run)
            if stored:
                run.log({}, step=stored)  # W&B's own count of rows continues
        missing = self._count - stored
        self._repeated = max(0, -missing)
        rows = self._last(missing)
        if missing > len(rows):
            rank_zero_warn(f"W&B lacks {missing - len(rows)} rows of earlier starts; metrics.csv has them")
        self._count = stored
        self._recent.clear()
        for step, values in rows:
            self._log(run, step, values)

    def _recorded(self, run: Any) -> tuple[int, int]:
        """How many rows are in the records of earlier starts, and the step of the last one, as far as is known."""
        known = stored_run(self._run_file)
        written = max(0, self._count - len(self._recent))
        if "rows" in known:
            self._write_run_file()  # this start may be killed
            return max(known["rows"], written), known["step"]
        if len(list(Path(run.dir).parent.parent.glob(f"offline-run-*-{run.id}"))) > 1:
            rank_zero_warn(
                "W&B: the start before this one was killed while it recorded offline: the steps since shortly before "
                "its checkpoint are recorded again, and an upload shows them twice"
            )
        return written, -1

    def _log(self, run: Any, step: int | None, values: dict[str, Any]) -> None:
        now = time.monotonic()
        try:
            if not self.gone:
                run.log(values if step is None else {**values, STEP: step})
                self._answered = now
        except Exception:
            if not self._has_gone(run):
                raise
        self._count += 1
        if step is not None:
            self._step = step
            self._recent.append((now, step, values))

    def _last(self, count: int) -> list[tuple[int, dict[str, Any]]]:
        return [(step, values) for _, step, values in list(self._recent)[-count:]] if count > 0 else []

    def _at_risk(self) -> int:
        """How many rows W&B's process had perhaps not written when it was last seen, with those logged since."""
        return sum(logged > self._answered - _WRITTEN_AFTER_S for logged, _, _ in self._recent)

    def _note_end(self) -> None:
        """Offline, leaves for the next start how much is recorded."""
        if self._mode == "offline":
            self._write_run_file(rows=self._count - (self._at_risk() if self.gone else 0), step=self._step)

    def _has_gone(self, run: Any) -> bool:
        """Whether W&B's process has ended before ours."""
        if not self.gone and not answers(run):
            self.gone = True
            forget_service()
        return self.gone

    def _write_run_file(self, **known: int) -> None:
        if self._run_file is not None:
            content = json.dumps({"id": self._id, **known}) + "\n"
            atomic_write(self._run_file, content.encode(), error=RunDirectoryError)

    def _named(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name


def build(config: WandbLoggerConfig, context: BuildContext) -> RunLogger:
    """The logger, with the run's id; only rank 0 looks for the network and writes."""
    run_dir = context.run_dir or Path()
    first = int(getattr(rank_zero_only, "rank", 0)) == 0
    mode, reason = wandb_mode(config.offline, context.environ) if first else ("disabled", "rank 0 logs")
    identity = run_id(run_dir) if context.run_dir is not None else None
    settings: dict[str, Any] = {}
    if FLUSH in wandb.Settings.model_fields and f"WANDB_{FLUSH.upper()}" not in context.environ:
        settings["settings"] = wandb.Settings(**{FLUSH: 1.0})  # it takes 15 seconds by itself
    run_file = run_dir / RUN_FILE if context.run_dir is not None else None
    logger = RunLogger(
        reason if mode == "offline" else None,
        run_file=run_file,
        position=resume_position(context.extras, RunLogger.position_key),
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
    if first and run_file is not None and not run_file.exists():
        logger._write_run_file()
    return logger


def run_id(run_dir: Path) -> str:
    """The id of this run at W&B: the one in `wandb-run.json`, else made from its path and its history's first line.

    So every rank and every start computes the same, and a new run at the path of a deleted one gets another.
    """
    stored = stored_run(run_dir / RUN_FILE)
    if stored:
        return str(stored["id"])
    digest = hashlib.sha256(str(run_dir.absolute()).encode())
    try:
        with (run_dir / "history.jsonl").open("rb") as history:
            digest.update(history.readline())
    except FileNotFoundError:
        pass  # a loop without a history: the path alone
    return digest.hexdigest()[:16]


def stored_run(file: Path | None) -> dict[str, Any]:
    """The run's id at W&B and, after an end offline, how much is recorded; nothing before the first start."""
    if file is None or not file.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        content["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{RUN_FILE} is damaged",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            fix='delete it for a new run at W&B, or write {"id": "..."} with the run\'s id from its page there',
        ) from error
    return content


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
