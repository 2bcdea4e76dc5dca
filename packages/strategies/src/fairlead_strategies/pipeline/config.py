"""The settings of a pipeline, for `pipeline_parallel` and for `hybrid`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fairlead_runs.pipeline_schedule import SCHEDULES, Schedule
from fairlead_strategies.mesh.config import MeshStrategyConfig

Numbers = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class PipelineFields(MeshStrategyConfig):
    """How a model becomes stages, and in which order they work."""

    schedule: Schedule = "1f1b"
    """In which order a rank works on micro-batches. `gpipe`: all forward passes, then all backward passes; keeps the
    activations of all micro-batches. `1f1b`: a backward pass as soon as there is one; keeps those of as many
    micro-batches as there are stages. `interleaved_1f1b`: several short stages a rank, a smaller bubble.
    `interleaved_zero_bubble` and `zbv_zero_bubble` compute gradients of weights where a rank would wait."""
    micro_batches: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Into how many parts a batch is cut; a batch that they do not divide is cut into fewer. `auto`: up to four times
    the stages' ranks, with which ranks wait for less than a fifth of a step."""
    stages_per_rank: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Stages on each rank; `auto`: as many as the schedule needs, 1 or 2."""
    split: Literal["parameters", "layers"] | Numbers | Names = "parameters"
    """Where the stages begin. `parameters` and `layers` give all stages about as many of them. A list of numbers says
    how many layers each stage has (`[8, 8, 8]`: the last of four takes the rest); a list of names with which layer each
    one begins."""
    first_stage_less_layers: float = Field(0, ge=0)
    """Layers that the first stage has less than others, since it has other work, such as an embedding."""
    last_stage_less_layers: float = Field(0, ge=0)
    """Layers that the last stage has less than others: it has the output layer and the loss."""
    check_loss: bool = True
    """Compare the loss of the first step with that of the full batch, which shows whether `pipeline_weight` is needed.
    It stores the outputs of that batch."""

    @property
    def local_stages(self) -> int:
        """Stages on each rank."""
        fewest, _ = SCHEDULES[self.schedule].stages_per_rank
        return fewest if self.stages_per_rank == "auto" else self.stages_per_rank
