"""Which checkpoints are kept.  One policy for every backend; it deletes only what is not the newest complete one."""

from __future__ import annotations

import errno
import itertools
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from fairlead.errors import CheckpointError, ConfigError
from fairlead_runs.commit.checkpoints import (
    TEMPORARY,
    Checkpoint,
    Rated,
    newest_complete,
    read_latest,
    readable_checkpoints,
    to_trash,
)
from fairlead_runs.commit.fence import Fence
from fairlead_runs.commit.files import Syscalls, atomic_write, disk_error, fenced_rename, remove_tree
from fairlead_runs.commit.manifest import verify

if TYPE_CHECKING:
    from fairlead.config import CheckpointConfig

KEEP = "KEEP"
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""What file systems without symbolic links answer (FAT, some FUSE and SMB mounts); `latest` is a file for them."""

R = TypeVar("R", bound=Rated)


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep; a checkpoint that any rule wants is kept.

    Attributes:
        last: The newest so many; None: all.
        best: The so many best ones by `metric`, a key of the metadata's `metrics`.
        metric: Needed when `best` is not 0.
        mode: Whether a small (`min`) or a large (`max`) value is good.
        every_n_steps: Those whose step is a multiple of it.
    """

    last: int | None = 1
    best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every_n_steps: int | None = None

    @classmethod
    def of(cls, config: CheckpointConfig, metric: str | None) -> RetentionPolicy:
        """What `trainer.checkpoint` says; `metric` None: it is not known yet, and none is a best one."""
        return cls(
            last=config.keep_last,
            best=config.keep_best if metric else 0,
            metric=metric,
            mode=config.mode,
            every_n_steps=config.keep_every_n_steps,
        )

    def __post_init__(self) -> None:
        """Refuses what has no meaning."""
        if self.best and self.metric is None:
            raise ConfigError(f"keeping the best {self.best} checkpoints needs a metric", fix="set its name")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"unknown mode {self.mode!r}", fix="write 'min' or 'max'")
        for name in ("last", "best", "every_n_steps"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name.startswith("every"))):
                raise ConfigError(f"{name} cannot be {value}", fix="give a positive number")


def best(checkpoints: Sequence[R], metric: str, mode: Literal["min", "max"] = "min") -> list[R]:
    """The checkpoints that have this metric, the best first; of equal ones the older.

    Read from the manifests, so it also holds after a restart.  NaN is no value.
    """
    rated = [(value, item) for item in checkpoints if (value := _metric(item, metric)) is not None]
    sign = 1.0 if mode == "min" else -1.0
    return [item for _, item in sorted(rated, key=lambda pair: (sign * pair[0], pair[1].order))]


def best_or_last(path: Path) -> Path:
    """The checkpoint that `RUN/best` or `RUN/last` names, or `RUN/checkpoints/best`; another path stays as it is.

    Manifests decide, not the links of these names, which a file system may not have.
    """
    root = path.parent if path.parent.name == "checkpoints" else path.parent / "checkpoints"
    if path.name not in ("best", "last") or not root.is_dir():
        return path
    newest = _newest(root)
    if path.name == "last":
        return newest.path
    found, monitor = _best(root, newest)
    if found is not None:
        return found.path
    raise CheckpointError(
        "no checkpoint here is the best one",
        where=str(root),
        why="no metric is monitored" if monitor is None else f"none of them has the metric {monitor!r}",
        fix="set trainer.checkpoint.monitor, or name `last` or one checkpoint",
    )


def best_or_newest(root: Path) -> tuple[Checkpoint, str]:
    """The checkpoint that an evaluation takes of a `checkpoints` directory, and why: the best, else the newest one.

    `CheckpointError`: there is no complete one.
    """
    newest = _newest(root)
    found, monitor = _best(root, newest)
    if found is None:
        return newest, "the newest" if monitor is None else f"the newest: no checkpoint has {monitor}"
    assert monitor is not None
    return found, f"the best by {monitor} ({_metric(found, monitor):.6g})"


def named_checkpoint(resume: str, run: Path, cwd: Path, *, evaluates: bool = False) -> str:
    """What `--resume` asks for as a path: `best` and `last` are of this run; `auto`, `never` and URLs stay.

    Of a run directory it is the newest checkpoint, and its best, if it has one, where `evaluates`.
    """
    if resume in ("auto", "never") or "://" in resume:
        return resume
    path = best_or_last(run / resume if resume in ("best", "last") else cwd / resume)
    root = path if path.name == "checkpoints" else path / "checkpoints"
    if not root.is_dir():
        return str(path)
    return str((best_or_newest(root)[0] if evaluates else _newest(root)).path)


def _newest(root: Path) -> Checkpoint:
    newest = newest_complete(root)
    if newest.checkpoint is None:
        raise CheckpointError(
            "there is no complete checkpoint here",
            where=str(root),
            why="\n".join(map(str, newest.skipped[:8])) or None,
            fix="`fairlead checkpoint ls` shows what there is",
        )
    return newest.checkpoint


def _best(root: Path, newest: Checkpoint) -> tuple[Checkpoint | None, str | None]:
    """The best checkpoint by the metric that the newest says is monitored, and that metric."""
    monitor, mode = newest.metadata.get("monitor"), newest.metadata.get("mode", "min")
    if not isinstance(monitor, str):
        return None, None
    rated = best(readable_checkpoints(root), monitor, mode)
    return next(iter(_first_sound(rated, 1, _sound)), None), monitor


def keep_forever(checkpoint: Checkpoint, *, syscalls: Syscalls | None = None) -> None:
    """Marks a checkpoint so that no retention deletes it; deleting the file `KEEP` in it takes that back."""
    atomic_write(checkpoint.path / KEEP, b"This checkpoint is kept until this file is deleted.\n", syscalls=syscalls)


def is_kept_forever(checkpoint: Checkpoint) -> bool:
    """Whether it is marked: by `keep_forever`, or by `keep: true` in its metadata."""
    return (checkpoint.path / KEEP).exists() or checkpoint.metadata.get("keep") is True


def retain(
    root: Path,
    policy: RetentionPolicy,
    *,
    held: Collection[str] = (),
    fence: Fence | None = None,
    syscalls: Syscalls | None = None,
) -> list[Checkpoint]:
    """Deletes what the policy does not keep, and returns it, oldest first; call it only after `publish` has returned.

    Before that, `last` and `best` become links to the newest and the best checkpoint, where the file system has links.
    Never deletes the newest complete checkpoint, what `latest` names, a marked one, or a damaged one (whose remains may
    still be wanted).  Of two checkpoints of one step, the older is deleted unless it is marked.

    Args:
        root: The `checkpoints` directory.
        policy: What is kept.
        held: Names of those that somebody is reading, as an upload; they stay for now.
        fence: That of the run's lock, where it has one: a start that was replaced deletes nothing.
    """
    system = syscalls or Syscalls()
    ordered = readable_checkpoints(root)
    try:
        _link(root, ordered, policy, system, fence)
    except OSError as error:
        raise disk_error(error, "cannot name the newest or the best checkpoint", root) from error
    if policy.last is None:
        return []
    keep = {read_latest(root), *held, *(item.name for item in chosen(ordered, policy, _sound))}
    deleted = []
    try:
        for checkpoint in ordered:
            if checkpoint.name in keep or is_kept_forever(checkpoint) or not _sound(checkpoint):
                continue
            trash = to_trash(checkpoint.path, system, fence)
            deleted.append(checkpoint)
            remove_tree(trash, system)
    except OSError as error:
        raise disk_error(error, "cannot delete an old checkpoint", root) from error
    return deleted


def _link(
    root: Path, ordered: list[Checkpoint], policy: RetentionPolicy, system: Syscalls, fence: Fence | None
) -> None:
    """Makes `last` and `best` name checkpoints: for people and scripts; nothing here trusts them."""
    for newest in _first_sound(reversed(ordered), 1, _sound):
        _point(root / "last", newest, system, fence)
    if policy.metric is not None and policy.best:  # without it, nothing says that the best one stays
        for item in _first_sound(best(ordered, policy.metric, policy.mode), 1, _sound):
            _point(root / "best", item, system, fence)


def _point(link: Path, checkpoint: Checkpoint, system: Syscalls, fence: Fence | None) -> None:
    """Makes a link lead to a checkpoint, at once; what is there and is no link stays."""
    if link.is_symlink():
        if str(link.readlink()) == checkpoint.name:
            return
    elif link.exists():
        return
    temporary = link.with_name(f"{TEMPORARY}{secrets.token_hex(6)}")
    try:
        system.symlink(checkpoint.name, temporary)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return
        raise
    fenced_rename(temporary, link, system, fence)


def chosen(ordered: Sequence[R], policy: RetentionPolicy, sound: Callable[[R], bool] = lambda _: True) -> set[R]:
    """What the rules of a policy keep of checkpoints, oldest first, wherever they are.

    A damaged one, by `sound`, is none of the last, and none of the best.
    """
    newest_of_step = {item.step: item for item in ordered}
    current = [item for item in ordered if newest_of_step[item.step] is item]
    keep = set(_first_sound(reversed(current), max(policy.last or 0, 1), sound))
    # Of a training that went on with weights that are no numbers, the last good one is worth more than all after it.
    keep.update(_first_sound((c for c in reversed(current) if c.metadata.get("finite") is not False), 1, sound))
    if policy.metric is not None:
        keep.update(_first_sound(best(current, policy.metric, policy.mode), policy.best, sound))
    if policy.every_n_steps is not None:
        keep.update(item for item in current if item.step % policy.every_n_steps == 0)
    return keep


def _sound(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path)


def _first_sound(candidates: Iterable[R], count: int, sound: Callable[[R], bool]) -> Iterator[R]:
    """The first so many that are complete by sizes: a damaged one keeps nothing alive."""
    return itertools.islice(filter(sound, candidates), count)


def _metric(checkpoint: Rated, name: str) -> float | None:
    metrics: Any = checkpoint.metadata.get("metrics")
    if not isinstance(metrics, dict):
        return None
    try:
        value = float(metrics[name])
    except (KeyError, TypeError, ValueError):
        return None
    return None if math.isnan(value) else value
