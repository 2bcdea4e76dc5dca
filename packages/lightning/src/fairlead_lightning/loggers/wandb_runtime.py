"""Builds Lightning's logger for Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import netrc
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fairlead.errors import RunDirectoryError
from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.wandb import WandbLoggerConfig
from fairlead_runs.commit import atomic_write

RUN_FILE: Final = "wandb-run.json"
SERVER: Final = "https://api.wandb.ai"
TIMEOUT_S: Final = 3.0


class RunLogger(WandbLogger):
    """Lightning's logger; with a `reason` it is offline, and says at the end how to upload the record."""

    def __init__(self, reason: str | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reason = reason

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends as Lightning's logger does; offline, prints the command that uploads the run."""
        super().finalize(status)
        run = self._experiment
        if self.reason is not None and run is not None and getattr(run, "dir", None):
            folder = Path(run.dir).parent  # `dir` is the `files` in it
            # Each start has left a folder of its own; wandb uploads those of one id in order.
            folders = sorted(folder.parent.glob(f"offline-run-*-{run.id}")) or [folder]
            command = shlex.join(["wandb", "sync", *map(str, folders)])
            print(f"W&B: recorded offline ({self.reason}); to upload:\n  {command}")


def build(config: WandbLoggerConfig, context: BuildContext) -> RunLogger:
    """The logger, with the run's id; only rank 0 looks for the network and writes."""
    run_dir = context.run_dir or Path()
    first = int(getattr(rank_zero_only, "rank", 0)) == 0
    mode, reason = wandb_mode(config.offline, context.environ) if first else ("disabled", "rank 0 logs")
    identity = run_id(run_dir) if context.run_dir is not None else None
    if first and identity is not None and not (run_dir / RUN_FILE).exists():
        content = json.dumps({"id": identity}) + "\n"
        atomic_write(run_dir / RUN_FILE, content.encode(), error=RunDirectoryError)
    return RunLogger(
        reason if mode == "offline" else None,
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
