"""What makes a run this run: if any of it changes, continuing would mix two experiments."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead.config import TrainerConfig
from fairlead.config.marks import MayChange, marked
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead_runs.commit.manifest import json_digest
from fairlead_runs.redaction import redact

_MARKS = marked(TrainerConfig, MayChange)
MAY_CHANGE: Mapping[str, str] = {f"trainer.{name}": mark.why for name, mark in _MARKS.items()}
"""What may change, with the reason.  Everything else of `model`, `data`, `run.seed` and `trainer` must stay."""
LIMITS = tuple(name for name, mark in _MARKS.items() if mark.limit)
_NOTHING = "(not set)"


@dataclass(frozen=True)
class Difference:
    """One setting that differs; texts as they are shown, `(not set)` where there is none."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Fingerprint:
    """The settings that count, nested, of JSON types, and the sha256 of their canonical JSON.

    Secrets are redacted: a renewed token is not another experiment. `accepts` are the paths at which, or below which, a
    run may have had other settings until now.
    """

    digest: str
    settings: Mapping[str, Any]
    accepts: tuple[str, ...] = field(default=(), compare=False)

    def continues(self, old: Fingerprint) -> bool:
        """Whether a job with these settings may continue a run of the old ones."""
        return self.digest == old.digest or all(self._accepted(one.path) for one in old.differences(self))

    def refused(self, old: Fingerprint) -> list[Difference]:
        """What keeps it from that."""
        return [one for one in old.differences(self) if not self._accepted(one.path)]

    def _accepted(self, path: str) -> bool:
        return any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in self.accepts)

    def differences(self, new: Fingerprint) -> list[Difference]:
        """What a later job changed, setting by setting: `trainer.precision: bf16-true -> 32-true`."""
        before, after = (
            {path: json.dumps(value, ensure_ascii=False) for path, value in leaves(settings)}
            for settings in (_shortened(self.settings, new.settings), _shortened(new.settings, self.settings))
        )
        return [
            Difference(path, *_shown(before.get(path), after.get(path)))
            for path in sorted(before.keys() | after.keys())
            if before.get(path) != after.get(path)
        ]

    def dump(self) -> bytes:
        """The text of `fingerprint.json`."""
        body = {"format": 1, "digest": self.digest, "settings": self.settings}
        return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> Fingerprint:
        """Reads `fingerprint.json`; `RunDirectoryError` where it is damaged or cannot be read."""
        try:
            body = json.loads(path.read_bytes())
            settings, digest = body["settings"], body["digest"]
            if digest != json_digest(settings):
                raise ValueError("its digest does not fit its settings")
        except OSError as error:
            raise RunDirectoryError("cannot read a run's fingerprint", where=str(path), why=error.strerror) from error
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                "a run's fingerprint is damaged",
                where=str(path),
                why=str(error),
                fix="use --resume never for a sibling directory, or move this one away",
            ) from None
        return cls(digest, settings)


def fingerprint(job: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a job, dumped with all its fields; `ConfigError` where a value is of no JSON type.

    Its `run.accept` names what is accepted.
    """
    run = job.get("run") or {}
    counted = {
        "model": job.get("model"),
        "data": job.get("data"),
        "run": {"seed": run.get("seed")},
        "trainer": job.get("trainer") or {},
    }
    canonical = _canonical(counted, "")
    if isinstance(canonical["trainer"].get("callbacks"), list):
        canonical["trainer"]["callbacks"] = _by_class(canonical["trainer"]["callbacks"])
    settings = redact(canonical)
    return Fingerprint(json_digest(settings), settings, tuple(run.get("accept") or ()))


def limits(job: Mapping[str, Any]) -> dict[str, Any]:
    """How long a job wants to train: a finished run with higher limits is not finished."""
    trainer = job.get("trainer") or {}
    return {name: _canonical(trainer.get(name), f"trainer.{name}") for name in LIMITS}


def _by_class(callbacks: list[Any]) -> dict[str, Any]:
    """Callbacks by the names of their classes: one that is added or removed moves no other."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for spec in callbacks:
        name = re.split(r"[.:]", spec["class"])[-1]
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}-{counts[name]}"] = spec
    return named


def _shortened(settings: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with no more than the class of a callback that the other job does not have."""
    trainer, others = settings.get("trainer") or {}, (other.get("trainer") or {}).get("callbacks") or {}
    callbacks = trainer.get("callbacks")
    if not isinstance(callbacks, Mapping):
        return settings
    identity = {name: spec if name in others else spec["class"] for name, spec in callbacks.items()}
    return {**settings, "trainer": {**trainer, "callbacks": identity}}


def _canonical(value: Any, path: str) -> Any:
    """JSON types, with 1.0 as 1 (YAML authors do not tell them apart) and without what may change."""
    if isinstance(value, Mapping):
        items = ((f"{path}.{key}" if path else str(key), str(key), item) for key, item in value.items())
        return {key: _canonical(item, at) for at, key, item in items if at not in MAY_CHANGE}
    if isinstance(value, (list, tuple)):
        return [_canonical(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ConfigError(
        f"a setting is a {type(value).__name__}, which is not plain data",
        where=path,
        fix="use text, numbers, lists, mappings, or {class: ..., args: ...}",
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting by its path; an empty mapping or list is one too."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _shown(old: str | None, new: str | None) -> tuple[str, str]:
    """Two JSON texts as people write them: texts without quotes, unless only the quotes differ."""
    before, after = (_NOTHING if text is None else _bare(text) for text in (old, new))
    return (old or _NOTHING, new or _NOTHING) if before == after else (before, after)


def _bare(text: str) -> str:
    value = json.loads(text)
    return value if isinstance(value, str) else text
