"""A checkpoint of a loop's run, read back: first looked at on all ranks, then loaded; the generators come last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import torch

from fairlead.errors import CheckpointError, FairleadError
from fairlead_distributed import set_rng_state
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import STATE_FILE
from fairlead_lightning.custom_loop.state import OWN, LoopState, loading
from fairlead_lightning.resume.rank_state import data_rank, load_part, rank_file, seed_anew
from fairlead_runs.commit import Checkpoint
from fairlead_runs.commit.manifest import file_problem
from fairlead_runs.data_ranks import replicas_in, replicas_of


def load_checkpoint(file: Path, objects: LoopState, fabric: lf.Fabric) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Loads what `LoopCheckpoints.save` wrote, on all ranks together: the metadata, and the run's own entry."""
    checkpoint = _of_a_loop(file)
    metadata = checkpoint.metadata
    objects.require_same(metadata.get("state"), checkpoint.path)
    same_ranks = _same_ranks(metadata, objects, fabric, checkpoint)
    mine = _together(checkpoint, fabric.global_rank if same_ranks else 0)
    with loading("the state of what Fabric has set up", file):
        rest = fabric.load(file, objects.of_strategy(), weights_only=True)
    objects.load_others(rest, file)
    own = rest[OWN]
    if own["precision"]:
        fabric.strategy.precision.load_state_dict(own["precision"])
    objects.load_own(mine, file, same_ranks=same_ranks)
    if same_ranks:
        set_rng_state(mine["rng"])
    else:
        seed_anew(torch.initial_seed(), int(metadata["step"]), data_rank(fabric))
    return metadata, own


def _of_a_loop(file: Path) -> Checkpoint:
    folder = file.parent if file.name == STATE_FILE else file
    try:
        checkpoint = Checkpoint.at(folder)
        _ = checkpoint.manifest
    except CheckpointError as error:
        raise CheckpointError(
            "this is no checkpoint of a loop's run",
            where=str(file),
            why=error.why or error.what,
            fix="name a folder under a run's checkpoints/; load another file with fabric.load() before the loop",
        ) from error
    return checkpoint


def _same_ranks(metadata: Mapping[str, Any], objects: LoopState, fabric: lf.Fabric, checkpoint: Checkpoint) -> bool:
    """Whether as many ranks go on; what is of each rank cannot be dealt out to another number of them."""
    before, now = int(metadata["world_size"]), fabric.world_size
    same_replicas = replicas_in(metadata) == replicas_of(fabric.strategy, now)
    if before == now and same_replicas:
        return True
    other = "" if before != now else ", and other ranks share each batch"
    if objects.per_rank:
        raise CheckpointError(
            f"{before} ranks have saved states of their own, {now} would go on" + other,
            where=str(checkpoint.path),
            why=f"per_rank: {', '.join(sorted(objects.per_rank))}",
            fix=f"start {before} ranks",
        )
    fabric.print(f"warning: {before} ranks have saved, {now} resume{other}: the random generators start fresh")
    return False


def _together(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """A rank's part, or the first error of any rank: no rank waits for one that could not read."""
    path, found, problem = checkpoint.path / rank_file(rank), {}, None
    try:
        expected = checkpoint.manifest.files.get(path.name)
        damage = file_problem(path, expected, deep=True) if expected is not None else "its manifest does not name it"
        if damage is not None:  # torch does not look
            raise CheckpointError(
                "a rank's part of the checkpoint is damaged",
                where=str(path),
                why=damage,
                fix="begin from an older one: RunConfig(resume=PATH)",
            )
        found = load_part(path)
    except FairleadError as error:
        problem = error
    first = next((error for error in gather_objects(problem) if error is not None), None)
    if first is not None:
        raise first
    return found
