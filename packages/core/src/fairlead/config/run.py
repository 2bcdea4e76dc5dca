"""Which run a job is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from fairlead.config.marks import NotExact
from fairlead.config_bases import ConfigModel


class RunConfig(ConfigModel):
    """Which run this is, and where its records are."""

    name: str | None = Field(default=None, min_length=1)
    """A template such as `gpt-lr{model.args.lr}`; None: the stem of the job file."""
    dir: str = Field(default="runs", min_length=1)
    """The folder that holds the run directories, relative to the working directory."""
    seed: Annotated[
        int | None,
        NotExact(
            lambda seed: seed is None,
            why="each start draws other random numbers, for first weights without a checkpoint and splits of the data",
            fix="run.seed: 0, or any number",
        ),
    ] = Field(default=0, ge=0, lt=2**32)
    """Seeds Python, NumPy and torch on every rank; None leaves them unseeded, and no resume is exact."""
    resume: Annotated[
        str,
        NotExact(
            lambda resume: resume.endswith(".ckpt"),
            why="a single file has no random state and no place in the data for each rank, unless Fairlead wrote it",
            fix="name a folder under checkpoints/, or resume: auto",
            certain=False,
        ),
    ] = "auto"
    """`auto`: the newest complete checkpoint of this run; `never`: a new sibling run; else the path of a checkpoint."""
    ckpt_path: str | None = None
    """A checkpoint to start from when this run has none of its own yet."""
    code: str | None = None
    """The folder of the user's code; None: found from the job file (nearest pyproject.toml or .git)."""

    @field_validator("dir", "ckpt_path", "code", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value
