"""`fairlead checkpoint export`: a folder that says what a model is and holds all that is needed to use it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_checkpoint_io.commands.convert import describe, report
from fairlead_checkpoint_io.commands.destination import source_and_target, write_at_once
from fairlead_checkpoint_io.commands.sources import Source, size_text
from fairlead_checkpoint_io.commands.states import read_any, weights_of, write_weights
from fairlead_checkpoint_io.files.formats import WEIGHTS_FILE
from fairlead_runs.checkpoint_job import job_file
from fairlead_runs.commit import hash_file
from fairlead_runs.commit.manifest import MANIFEST, Manifest


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads a checkpoint of a run, writes the folder."""
    path, output = arguments.path, arguments.output
    with source_and_target(path, output, session, overwrite=arguments.overwrite, where="--output") as (source, target):
        if source.format.weights_only:
            where = str(source.content)
            raise ConfigError("this holds weights only", where=where, fix="export the checkpoint of the run")
        job = job_file(source.path)
        document = cast("dict[str, Any]", yaml.load_file(job).data)
        state = read_any(source, arguments.trust)
        weights, metadata = weights_of(state, source.content), _metadata(source, state)
        left_out: list[str] = []

        def fill(folder: Path) -> None:
            left_out.extend(write_weights(weights, folder / WEIGHTS_FILE, describe(source, state)))
            (folder / job.name).write_bytes(job.read_bytes())
            card = _model_card(target.name, document, metadata, folder / WEIGHTS_FILE)
            (folder / "README.md").write_text(card, encoding="utf-8")
            files = {name: hash_file(folder / name) for name in sorted(os.listdir(folder))}
            (folder / MANIFEST).write_bytes(Manifest.now(files, metadata).dump())

        write_at_once(target, fill, folder=True)
        report(source, target, arguments, session, to="export", left_out=left_out)
    return 0


def _metadata(source: Source, state: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the checkpoint: from its manifest, else from its own state."""
    known = dict(source.own.metadata) if source.own is not None else {}
    known.pop("hyperparameters", None)
    step, epoch = (known.get(name, state.get(key)) for name, key in (("step", "global_step"), ("epoch", "epoch")))
    created = source.own.manifest.created if source.own is not None else None
    return {**known, "step": step, "epoch": epoch, "checkpoint": source.name, "written": created}


# -- README.md


def _model_card(name: str, job: Mapping[str, Any], metadata: Mapping[str, Any], weights: Path) -> str:
    """The text of README.md: what the model is, what it was trained on, and lines that load it."""
    model, data = _spec(job.get("model")), _spec(job.get("data"))
    by_script = "class" not in model  # a loop names its modules
    if by_script and len(model) == 1:
        model = _spec(*model.values())
    facts = [
        ("model", f"`{model.get('class', '?')}`"),
        ("data", f"`{data.get('class', '?')}`" if data else "the script's" if by_script else "the model's own loaders"),
        ("step", metadata.get("step")),
        ("epochs", metadata.get("epoch")),
        ("ranks", metadata.get("world_size")),
        ("checkpoint", f"`{metadata['checkpoint']}`"),
        ("written", metadata.get("written")),
        ("weights", f"`{weights.name}`, {size_text(weights.stat().st_size)}"),
    ]
    lines = [
        "---",
        "library_name: fairlead",
        "tags: [safetensors]",
        "---",
        "",
        f"# {name}",
        "",
        "The weights of one checkpoint of a training run, the job that trained it, and this page; exported by",
        "`fairlead checkpoint export`. `manifest.json` has the checksums: `fairlead checkpoint verify` compares them.",
        "",
        *_table(("", ""), [(key, value) for key, value in facts if value is not None]),
    ]
    metrics = metadata.get("metrics")
    if isinstance(metrics, Mapping) and metrics:
        lines += ["", "## Metrics", "", *_table(("metric", "value"), list(metrics.items()))]
    spec = yaml.dump({"model": job.get("model"), "data": job.get("data")}).rstrip()
    lines += ["", "## Model", "", "```yaml", spec, "```", "", "## Load it", "", *_loading(name, by_script)]
    return "\n".join(lines) + "\n"


def _loading(name: str, by_script: bool) -> Iterator[str]:
    """Lines that run where the model's code can be imported and the folder is in the working directory."""
    if by_script:
        yield "In the script that makes the model, with the folder that holds this one as the working directory:"
        yield from ("", "```python", "from safetensors.torch import load_model", "")
        yield from (f'load_model(model, "{name}/weights.safetensors")', "```")
        return
    yield "Where the model's code can be imported, with the folder that holds this one as the working directory:"
    yield from ("", "```python", "from fairlead import Trainer", "")
    yield f'trainer = Trainer.from_checkpoint("{name}")  # model, weights and data, as job.yaml describes them'
    yield from ("model = trainer.rebuilt.model", "```")


def _spec(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {"class": value} if isinstance(value, str) else {}


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for key, value in rows:
        cell = str(value).replace("|", "\\|").replace("\n", " ")
        yield f"| {key} | {cell} |"
