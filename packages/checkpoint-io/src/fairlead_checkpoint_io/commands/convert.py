"""`fairlead checkpoint convert` and `consolidate`: the same state in another format."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_checkpoint_io.commands.destination import prepare_target, source_and_target, write_whole
from fairlead_checkpoint_io.commands.sources import Source, size_text, sources
from fairlead_checkpoint_io.commands.states import only_weights, read_any, weights_of, write_distributed, write_weights
from fairlead_checkpoint_io.files.snapshot import on_host
from fairlead_checkpoint_io.files.writing import write_state


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads A, writes B in the format that was asked for."""
    with source_and_target(arguments.a, arguments.b, session, overwrite=arguments.overwrite, where="B") as (
        source,
        target,
    ):
        if source.format == "safetensors" and arguments.to == "safetensors":
            raise ConfigError("A is a safetensors file already", where=str(source.content), fix="copy it")
        state = read_any(source, arguments.trust)
        left_out: list[str] = []
        if arguments.to == "safetensors":
            weights, described = weights_of(state, source.content), describe(source, state)
            write_whole(target, lambda path: left_out.extend(write_weights(weights, path, described)))
        else:
            if arguments.weights:
                state = only_weights(state, source.content)
            if arguments.to == "torch":
                _write_plain(state, target)
            else:
                write_whole(target, partial(write_distributed, state, where=source.content), folder=True)
        report(source, target, arguments, session, to=arguments.to, left_out=left_out)
    return 0


def run_consolidate(arguments: argparse.Namespace, session: Session) -> int:
    """`fairlead checkpoint consolidate`: a checkpoint of any format in one plain Lightning file."""
    with sources((arguments.path,), session) as (source,):
        target = Path(session.cwd, arguments.output or f"{source.name}.ckpt").expanduser()
        prepare_target(target, source.path, source.content, overwrite=arguments.overwrite, where="--output")
        _write_plain(read_any(source, arguments.trust), target)
        report(source, target, arguments, session, to="torch", left_out=[])
    return 0


def _write_plain(state: dict[str, Any], target: Path) -> None:
    """One plain file, durable and atomic; equal states give equal bytes."""
    write_whole(target, partial(write_state, on_host(state).state))


def describe(source: Source, state: dict[str, Any]) -> dict[str, Any]:
    """What weights are of, in a few words."""
    return {"step": state.get("global_step"), "epoch": state.get("epoch"), "checkpoint": source.name}


def report(
    source: Source, target: Path, arguments: argparse.Namespace, session: Session, *, to: str, left_out: list[str]
) -> None:
    """Says what was written, and what was not."""
    if left_out:
        session.warn(f"left out, because safetensors holds tensors only: {', '.join(left_out)}")
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if arguments.json:
        session.print_json(
            {
                "from": source.location,
                "from_format": source.format,
                "to": str(target),
                "to_format": to,
                "size": size,
                "left_out": left_out,
            }
        )
    else:
        session.print(f"{target}: {to}, {size_text(size)}, from {source.location} ({source.format})")
