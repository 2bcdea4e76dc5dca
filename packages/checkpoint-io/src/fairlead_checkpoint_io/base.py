"""The settings that all backends have that write one file with `torch.save`."""

from __future__ import annotations

from pydantic import Field, field_validator

from fairlead.bases import CheckpointIOConfigBase

__all__ = ["FileCheckpointIOConfig"]


class FileCheckpointIOConfig(CheckpointIOConfigBase):
    """One file, written by rank 0; readable by `torch.load(path, weights_only=True)`."""

    safe_globals: tuple[str, ...] = Field(default=(), strict=False)
    """Classes and functions, as `package.module.Name`, that a checkpoint may contain besides tensors and plain
    data. Loading one imports and calls it, so name only what you trust. Default none: nothing is run on loading."""
    verify: bool = True
    """Compare the checksums inside the file while it is being loaded; torch itself does not. Off: loading is
    somewhat faster, and flipped bits go unnoticed."""

    @field_validator("safe_globals")
    @classmethod
    def _dotted(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if "." not in name or not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not a name like argparse.Namespace")
        return names
