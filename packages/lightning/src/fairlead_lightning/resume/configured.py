"""What a script has set up, noticed where a later start sets it up otherwise; and whose value counts then."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from fairlead.config import TrainerConfig
from fairlead.errors import RunDirectoryError
from fairlead.findings import Finding, Inexact
from fairlead_distributed.run.session import RunSession
from fairlead_runs.commit import atomic_write
from fairlead_runs.fingerprints import leaves
from fairlead_runs.redaction import redact

CONFIGURED_FILE: Final = "configured.json"
_ATOMS: Final = (bool, int, float, str, type(None))
_TRAINER: Final = (
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "reload_dataloaders_every_n_epochs",
)
_IN_CHECKPOINTS: Final = ("optimizers", "schedules")


class Configured:
    """The arguments of a fit's objects, as far as they are plain data in attributes of the constructor's names.

    Nothing of it identifies the run: it is compared with that of the start which made the checkpoint, and reported.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        """Before anything is restored."""
        data = getattr(trainer, "datamodule", None)
        self._shared = _shared(getattr(trainer, "fairlead_config", None))
        self._now: dict[str, Any] = {
            "trainer": {name: _plain(vars(trainer).get(name)) for name in _TRAINER},
            "model": _arguments(trainer.lightning_module),
            "data": _arguments(data) if data is not None else {},
            "callbacks": _callbacks(trainer),
        }

    def optimizers_made(self, trainer: L.Trainer) -> None:
        """And nothing of theirs is restored."""
        self._now |= _optimizers(trainer)

    def announce(self, trainer: L.Trainer, session: RunSession, say: Callable[[str], None]) -> list[Inexact]:
        """Tells what is not as in the start that made the checkpoint, as a reason for another end; all is restored."""
        changes = self._changes(trainer, session)
        if not changes:
            return []
        fix = f"undo it; or --resume weights:{session.checkpoint} starts a new run with the current settings"
        what = "not everything is as it was when the checkpoint was made"
        session.event("settings-changed", changes=changes)
        say(str(Finding("warning", "settings-changed", what, why="\n".join(changes), fix=fix)))
        what = "what has changed since the checkpoint was made"
        return [Inexact(what, why="; ".join(changes), fix=fix, certain=False)]

    def _changes(self, trainer: L.Trainer, session: RunSession) -> list[str]:
        """By their paths, and whose value counts."""
        varies = vars(trainer)["reload_dataloaders_every_n_epochs"]  # what a loader holds may be another each time
        now = {**self._now, "loaders": [] if varies else _loaders(trainer)}
        self._now = now
        if session.checkpoint is None:
            return []
        before = _recorded(session)
        actual = {**now, **_optimizers(trainer), "callbacks": _callbacks(trainer)}
        if before is None:  # a checkpoint of Lightning's own says what is in it, and no more
            before = {**now, **{name: actual[name] for name in _IN_CHECKPOINTS}}
        old, new, counts = (dict(leaves(redact(one))) for one in (before, now, actual))
        return [
            f"{path}: {_text(old, path)} -> {_text(new, path)} ({_whose(new, counts, path)})"
            for path in sorted(old.keys() | new.keys())
            if old.get(path) != new.get(path) and not (self._shared and self._shared.fullmatch(path))
        ]

    def write(self, start: Path) -> None:
        """Writes it down in the folder of a start."""
        text = json.dumps(redact(self._now), indent=1) + "\n"
        try:
            atomic_write(start / CONFIGURED_FILE, text.encode(), error=RunDirectoryError)
        except RunDirectoryError as error:
            warnings.warn(f"a later start cannot tell what has changed since this one: {error.block()}", stacklevel=2)


def _shared(config: object) -> re.Pattern[str] | None:
    """The values that are each rank's share of a global batch, and so others with other ranks."""
    if not isinstance(config, TrainerConfig) or config.batch_size != "global":
        return None
    return re.compile(rf"loaders\[\d+\]\.batch_size|{re.escape(config.batch_size_from.replace('.args.', '.', 1))}")


def _recorded(session: RunSession) -> dict[str, Any] | None:
    """What the start that made the checkpoint has written down."""
    assert session.checkpoint is not None
    start = (session.previous or {}).get("start")
    try:
        found = json.loads((session.checkpoint.parents[2] / "starts" / str(start) / CONFIGURED_FILE).read_bytes())
    except (OSError, ValueError):  # of an older version, downloaded without its run, or plain Lightning's
        return None
    return found if isinstance(found, dict) else None


def _whose(new: Mapping[str, Any], counts: Mapping[str, Any], path: str) -> str:
    if counts.get(path) == new.get(path):
        return "the new value counts"
    return f"the checkpoint's counts: {_text(counts, path)}"


def _text(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path]) if path in values else "(not set)"


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value] if len(value) <= 64 else f"{len(value)} items"
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, _ATOMS) else f"<{type(value).__qualname__}>"


def _arguments(thing: object) -> dict[str, Any]:
    """Its attributes that have the names of its constructor's arguments."""
    names = {
        name
        for kind in type(thing).__mro__[:-1]
        if "__init__" in vars(kind)
        for name in inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    }
    held = vars(thing) if hasattr(thing, "__dict__") else {}
    plain = {name: _plain(held[name]) for name in sorted(names) if name in held}
    return {name: value for name, value in plain.items() if not (isinstance(value, str) and value.startswith("<"))}


def _callbacks(trainer: L.Trainer) -> list[dict[str, Any]]:
    given = (one for one in vars(trainer)["callbacks"] if not type(one).__module__.startswith("fairlead"))
    return [{"class": type(one).__qualname__, **_arguments(one)} for one in given]


def _optimizers(trainer: L.Trainer) -> dict[str, Any]:
    return {
        "optimizers": [
            {"class": type(one).__qualname__, "groups": [_group(group) for group in one.param_groups]}
            for one in trainer.optimizers
        ],
        "schedules": [
            {"class": type(one.scheduler).__qualname__, **_arguments(one.scheduler)}
            for one in trainer.lr_scheduler_configs
        ],
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group; of a rate that a schedule moves, where it began."""
    moved = {"params", "lr"} if "initial_lr" in group else {"params"}
    return {name: _plain(value) for name, value in group.items() if name not in moved}


def _loaders(trainer: L.Trainer) -> list[dict[str, Any]]:
    loaders = CombinedLoader(trainer.train_dataloader).flattened if trainer.train_dataloader is not None else []
    return [
        {name: _plain(getattr(one, name, None)) for name in ("batch_size", "drop_last")}
        | {"samples": sized_len(getattr(one, "dataset", None))}
        for one in loaders
    ]
