"""What can be said of a pipeline before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fairlead import Finding, Resolution
from fairlead_runs.pipeline_schedule import SCHEDULES, bubble_fraction, usable
from fairlead_strategies.layout import Layout
from fairlead_strategies.pipeline.config import PipelineFields

CODES: Final[Mapping[str, str]] = {
    "pipeline-alone": "A pipeline of one rank.",
    "pipeline-bubble": "The part of each step in which the ranks of a pipeline wait.",
    "pipeline-checkpoint-io": "The checkpoint_io takes shards, and a pipeline gathers whole checkpoints.",
    "pipeline-divergence": "The ranks of a pipeline hold different layers, which cannot be compared.",
    "pipeline-micro-batches": "The number of micro-batches does not fit the schedule or the stages.",
    "pipeline-stages": "The schedule does not take so many stages on a rank.",
}


def pipeline_findings(config: PipelineFields, layout: Layout, resolution: Resolution) -> Iterator[Finding]:
    """The bubble, and settings that do not fit each other or the rest of the run."""
    ranks, local = layout.pipeline, config.local_stages
    where = "trainer.strategy"
    if ranks == 1:
        return
    fewest, most = SCHEDULES[config.schedule].stages_per_rank
    if local < fewest or (most is not None and local > most):
        wanted = f"{fewest}" if fewest == most else f"{fewest} or more"
        yield Finding(
            "error",
            "pipeline-stages",
            f"{config.schedule} takes {wanted} stages a rank, not {local}",
            where=f"{where}.stages_per_rank",
            fix="leave stages_per_rank out, or choose an interleaved schedule for several stages",
        )
        return
    yield from _micro_batches(config, ranks, local)
    if resolution.checkpoint_io.saves_shards or config.save_distributed_checkpoint:
        yield Finding(
            "error",
            "pipeline-checkpoint-io",
            "a pipeline gathers its checkpoint on rank 0, and does not write it in parts",
            where="trainer.checkpoint_io"
            if resolution.checkpoint_io.saves_shards
            else f"{where}.save_distributed_checkpoint",
            fix="checkpoint_io: torch, and leave save_distributed_checkpoint out",
        )
    if resolution.trainer.check_divergence_every_n_steps is not None:
        yield Finding(
            "error",
            "pipeline-divergence",
            "the ranks of a pipeline hold different layers, and have nothing to compare",
            where="trainer.check_divergence_every_n_steps",
            fix="leave it out",
        )


def _micro_batches(config: PipelineFields, ranks: int, local: int) -> Iterator[Finding]:
    requested, where = config.micro_batches, "trainer.strategy.micro_batches"
    count = 4 * ranks if requested == "auto" else requested
    if not usable(config.schedule, count, ranks):
        rounds = count // ranks
        yield Finding(
            "error",
            "pipeline-micro-batches",
            f"{config.schedule} cannot be laid out for {count} micro-batches on {ranks} ranks",
            where=where,
            why=f"it goes in {rounds} rounds of equal size, and {rounds} does not divide {count}",
            fix=f"micro_batches: {rounds * ranks}",
        )
        return
    fraction = bubble_fraction(ranks, count, local)
    most = "at most " if "zero_bubble" in config.schedule else ""
    divided = f"({ranks} - 1) / ({f'{local} x ' if local > 1 else ''}{count} + {ranks} - 1)"
    says = f"the ranks wait {most}{fraction:.0%} of each step: {divided}"
    if count < ranks * local:
        yield Finding(
            "warning",
            "pipeline-micro-batches",
            f"{count} micro-batches are fewer than the {ranks * local} stages: {says}",
            where=where,
            why="there is never work for all stages at the same time",
            fix=f"micro_batches: {4 * ranks} or more, and a batch that it divides",
        )
        return
    upto = "up to " if requested == "auto" else ""
    yield Finding("info", "pipeline-bubble", f"{config.schedule} with {upto}{count} micro-batches: {says}", where=where)
