"""`fairlead checkpoint convert` and `consolidate`: the same state in another format."""

from __future__ import annotations

import argparse
import pkgutil
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, did_you_mean
from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat, known_formats, torch_file
from fairlead_checkpoint_io.commands.destination import prepare_target, source_and_target, write_at_once
from fairlead_checkpoint_io.commands.sources import Source, size_text, sources
from fairlead_checkpoint_io.commands.states import only_weights, read_any


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads A, writes B in the requested format."""
    to = _written(arguments.to, session)
    with source_and_target(arguments.a, arguments.b, session, overwrite=arguments.overwrite, where="B") as (
        source,
        target,
    ):
        if source.format is to and to.weights_only:
            raise ConfigError(f"A is in the format {to} already", where=str(source.content), fix="copy it")
        state = read_any(source, arguments.trust)
        if arguments.weights:
            state = only_weights(state, source.content)
        left_out = _write(to, state, target, source)
        report(source, target, arguments, session, to=arguments.to, left_out=left_out)
    return 0


def run_consolidate(arguments: argparse.Namespace, session: Session) -> int:
    """`fairlead checkpoint consolidate`: a checkpoint of any format in one plain Lightning file."""
    with sources((arguments.path,), session) as (source,):
        target = Path(session.cwd, arguments.output or f"{source.name}.ckpt").expanduser()
        prepare_target(
            target, source.path, source.content, session=session, overwrite=arguments.overwrite, where="--output"
        )
        _write(torch_file, read_any(source, arguments.trust), target, source)
        report(source, target, arguments, session, to="torch", left_out=[])
    return 0


def _written(name: str, session: Session) -> CheckpointFormat:
    """The format that `--to` names."""
    known = {one.name: one for one in known_formats(session) if one.write is not None}
    if name in known:
        return known[name]
    near = did_you_mean(name, known)
    raise ConfigError(
        f"no checkpoint is written in the format {name!r}",
        where="--to",
        why=f"there are: {', '.join(sorted(known))}",
        fix=f"did you mean {near!r}?" if near else "choose one of those, or install the plugin that has it",
    )


def _write(to: CheckpointFormat, state: dict[str, Any], target: Path, source: Source) -> list[str]:
    """Writes durably, completely or not at all; gives what the format could not hold."""
    left_out: list[str] = []
    write_at_once(
        target,
        lambda path: left_out.extend(pkgutil.resolve_name(str(to.write))(state, path, source.content)),
        folder=to.folder,
    )
    return left_out


def describe(source: Source, state: dict[str, Any]) -> dict[str, Any]:
    """What weights are of, in a few words."""
    return {"step": state.get("global_step"), "epoch": state.get("epoch"), "checkpoint": source.name}


def report(
    source: Source, target: Path, arguments: argparse.Namespace, session: Session, *, to: str, left_out: list[str]
) -> None:
    """Says what was written, and what was not."""
    if left_out:
        session.warn(f"left out, because the format cannot hold it: {', '.join(left_out)}")
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if arguments.json:
        session.print_json(
            {
                "from": source.location,
                "from_format": source.format.name,
                "to": str(target),
                "to_format": to,
                "size": size,
                "left_out": left_out,
            }
        )
    else:
        session.print(f"{target}: {to}, {size_text(size)}, from {source.location} ({source.format})")
