"""`fairlead checkpoint export`: a folder that says what a model is and holds all that is needed to use it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_checkpoint_io.commands.card import model_card
from fairlead_checkpoint_io.commands.convert import describe, report
from fairlead_checkpoint_io.commands.destination import prepare_target, write_folder_whole
from fairlead_checkpoint_io.commands.places import WEIGHTS_FILE, Source
from fairlead_checkpoint_io.commands.states import read_any, weights_of
from fairlead_checkpoint_io.commands.stored import is_stored, sources
from fairlead_checkpoint_io.commands.weights_file import write_weights
from fairlead_runs.carried import job_file
from fairlead_runs.commit import hash_file
from fairlead_runs.commit.manifest import MANIFEST, Manifest

__all__ = ["run"]


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads a checkpoint of a run, writes the folder."""
    target = Path(session.cwd, arguments.output).expanduser()
    if is_stored(arguments.path):
        prepare_target(target, overwrite=arguments.overwrite, where="--output")  # not only after the download
    with sources((arguments.path,), session) as (source,):
        return _exported(source, target, arguments, session)


def _exported(source: Source, target: Path, arguments: argparse.Namespace, session: Session) -> int:
    if source.format == "safetensors":
        raise ConfigError("this holds weights only", where=str(source.content), fix="export the checkpoint of the run")
    prepare_target(target, source.path, source.content, overwrite=arguments.overwrite, where="--output")
    job = job_file(source.path)
    document = cast("dict[str, Any]", yaml.load_file(job).data)
    state = read_any(source, arguments.trust)
    weights, metadata = weights_of(state, source.content), _metadata(source, state)
    left_out: list[str] = []

    def fill(folder: Path) -> None:
        left_out.extend(write_weights(weights, folder / WEIGHTS_FILE, describe(source, state)))
        (folder / job.name).write_bytes(job.read_bytes())
        card = model_card(target.name, document, metadata, job.parent, folder / WEIGHTS_FILE)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = {name: hash_file(folder / name) for name in sorted(os.listdir(folder))}
        (folder / MANIFEST).write_bytes(Manifest.now(files, metadata).dump())

    write_folder_whole(target, fill)
    if left_out:
        session.warn(f"left out, because safetensors holds tensors only: {', '.join(left_out)}")
    report(source, target, arguments, session, to="export", left_out=left_out)
    return 0


def _metadata(source: Source, state: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the checkpoint: from its manifest, else from its own state."""
    known = dict(source.own.metadata) if source.own is not None else {}
    known.pop("hyperparameters", None)
    step, epoch = (known.get(name, state.get(key)) for name, key in (("step", "global_step"), ("epoch", "epoch")))
    created = source.own.manifest.created if source.own is not None else None
    return {**known, "step": step, "epoch": epoch, "checkpoint": source.name, "written": created}
