"""What `ls` and `verify` show of a run on a store; a checkpoint is not downloaded for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fairlead.errors import ConfigError
from fairlead_checkpoint_io.commands.checked import Bytes, Checked, Task
from fairlead_checkpoint_io.commands.rows import Listing, Row
from fairlead_checkpoint_io.commands.stored import StoredRun, stored_run
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.retention import KEEP
from fairlead_runs.remote import RemoteCheckpoint, Store
from fairlead_runs.remote.listing import changed

__all__ = ["listed", "planned"]

_UNFINISHED: Final = "unfinished: being uploaded, or left by a killed start"


def listed(url: str) -> Listing:
    """The checkpoints of a run on a store, or the one that was named; only manifests are read.

    Raises:
        FairleadError: There is no such run or checkpoint; the store refuses, or does not answer.
    """
    run = stored_run(url)
    # Those whose manifest is damaged come first, as in a folder.
    ordered = sorted(run.found.checkpoints, key=lambda item: (item.manifest is not None, item.order))
    latest = run.latest
    unfinished: list[dict[str, Any]] = [
        {"name": name, "problem": _UNFINISHED, "age_s": None} for name in run.found.unfinished
    ]
    if _leads_nowhere(run, latest):
        unfinished.append({"name": "latest", "problem": f"names {latest}, which is not there", "age_s": None})
    listing = Listing(run.store.url, latest, [_row(item) for item in ordered], unfinished)
    found = {item.name: item for item in ordered if item.manifest is not None}
    listing.label(
        found, {name for name, item in found.items() if KEEP in item.entries or item.metadata.get("keep") is True}
    )
    return listing


def planned(url: str, *, newest: bool) -> tuple[list[Checked], list[Task], list[str]]:
    """What `verify` is to read, one task a file, and what is no checkpoint because its upload has not ended.

    Raises:
        FairleadError: There is nothing to verify; the store refuses, or does not answer.
    """
    run = stored_run(url)
    chosen, unfinished = run.found.checkpoints, run.found.unfinished
    if newest:
        if run.name is not None:
            raise ConfigError("--newest is about a run, this is one checkpoint", where=url, fix="leave it out")
        chosen, unfinished = sorted(chosen, key=lambda item: item.order)[-1:], []
    if not chosen and run.name is None:
        why = f"not uploaded to their end: {', '.join(unfinished)}" if unfinished else None
        raise ConfigError("there are no checkpoints to verify", where=run.store.url, why=why, fix="name another run")
    checked: list[Checked] = []
    tasks: list[Task] = []
    for item in chosen:
        one = Checked(Path(item.name), item.url)
        checked.append(one)
        tasks += _tasks(one, item, run.store)
    if run.name is not None and not chosen:
        problem = {"file": "manifest.json", "problem": "missing: it was not uploaded to its end"}
        checked.append(Checked(Path(run.name), f"{run.store.url}/{run.name}", damage=[problem]))
        unfinished = []
    elif run.name is None and _leads_nowhere(run, latest := run.latest):
        problem = {"file": "latest", "problem": f"it names {latest}, which is not there"}
        checked.append(Checked(Path(run.store.url.rpartition("/")[2]), run.store.url, damage=[problem]))
    return checked, tasks, unfinished


def _row(item: RemoteCheckpoint) -> Row:
    row = Row(item.name, item.url, step=item.step)
    row.describe(item, item.damages())
    row.complete = not row.damage
    return row


def _leads_nowhere(run: StoredRun, latest: str | None) -> bool:
    """Of one checkpoint nothing is known of the others."""
    return run.name is None and latest is not None and latest not in {item.name for item in run.found.checkpoints}


def _tasks(one: Checked, item: RemoteCheckpoint, store: Store) -> list[Task]:
    one.damage += [{"file": damage.file or item.name, "problem": damage.problem} for damage in item.damages()]
    if item.manifest is None:
        return []
    files = item.manifest.files
    for algorithm in {expected.algorithm for expected in files.values()}:
        new_hasher(algorithm)  # a missing package is one error, not one a file
    wrong = {damage["file"] for damage in one.damage}
    one.files, one.size = len(files), sum(expected.size for expected in files.values())
    return [
        (one, _compare(store, item.name, name, expected), name) for name, expected in files.items() if name not in wrong
    ]


def _compare(store: Store, checkpoint: str, name: str, expected: FileHash) -> Callable[[Bytes], str | None]:
    def problem(reader: Bytes) -> str | None:
        damage = changed(store, checkpoint, name, expected, reader.add)
        return damage.problem if damage is not None else None

    return problem
