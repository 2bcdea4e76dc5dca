"""Which weights an evaluation takes: decided before torch is imported, and named in the first line of its output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairlead.errors import CheckpointError
from fairlead_runs.commit import best_or_newest, list_checkpoints, named_checkpoint
from fairlead_runs.describe import shown_path
from fairlead_runs.remote.store import is_url


@dataclass(frozen=True)
class Weights:
    """A checkpoint, a file or a URL to load, and the line that says so; `source` None: the model as it is built."""

    source: str | None
    line: str


def weights_to_evaluate(resume: str, run: Path, cwd: Path, *, never: str = "--resume never") -> Weights:
    """What `validate`, `test` and `predict` load for `auto`, `never`, `best`, `last`, a path or a URL.

    `auto` is the best checkpoint of the run directory `run` by the metric that it monitors, else its newest one.
    `CheckpointError` where there is none; `never` is how the caller would ask for the model as it is built.
    """
    resume = resume.removeprefix("weights:")
    if resume == "never":
        return Weights(None, f"{'weights':<12}as the model is built ({never})")
    if resume == "auto":
        if not list_checkpoints(run / "checkpoints"):
            raise CheckpointError(
                "this run has no complete checkpoint yet: there are no trained weights to evaluate",
                where=str(run),
                fix=f"fit the job, name a checkpoint or another run, or evaluate the model as it is built: {never}",
            )
        found, why = best_or_newest(run / "checkpoints")
        return Weights(str(found.path), f"{'weights':<12}{shown_path(found.path, cwd)}, {why}")
    named = named_checkpoint(resume, run, cwd, evaluates=True)
    if not is_url(named) and not Path(named).exists():
        raise CheckpointError(
            "the checkpoint does not exist",
            where=f"--resume {resume}" if "--resume" in never else resume,
            fix="name a run directory, a folder under its checkpoints/, or a .ckpt file",
        )
    return Weights(named, f"{'weights':<12}{named if is_url(named) else shown_path(Path(named), cwd)}")
