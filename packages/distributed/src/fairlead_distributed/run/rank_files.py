"""The part of a checkpoint that one rank writes, and what stands in for it where another number of ranks goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairlead.errors import CheckpointError
from fairlead_distributed._sampling import derive_seed
from fairlead_distributed.rng import seed_xla


def rank_file(rank: int) -> str:
    """The name of the part of a checkpoint that one rank writes."""
    return f"rank-{rank:05d}.pt"


def load_part(path: Path, what: str = "a rank's part of the checkpoint") -> Any:
    """What a file of a checkpoint holds, tensors and plain data; `what` is its name in the error.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, OS: torch.load raises whatever it meets
        raise CheckpointError(
            f"{what} cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="name an older checkpoint: --resume PATH, in a script RunConfig(resume=PATH)",
        ) from error


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seeds the generators of a `data_rank` where there is no state of them: another number of ranks goes on."""
    number = derive_seed("rank", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
    seed_xla(number)
