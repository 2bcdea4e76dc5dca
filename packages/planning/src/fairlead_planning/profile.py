"""What one training step of a module does and keeps: its operators and its tensors, without their data.

Sizes are of one rank that holds the full model and works on one micro-batch. `memory` and `step_time` say what
becomes of them under a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal["matmul", "attention", "other"]
CAST: Final = "_to_copy of a parameter"
"""The name of a kernel that makes a parameter's copy in another format, which no row of the batch makes larger."""


@dataclass(frozen=True)
class Unit:
    """A part of the model that is gathered, checkpointed or put into a stage as one: mostly a transformer's layer.

    The first is what lies outside of all others (embedding, last norm, head), under the name "".
    """

    name: str
    """Its path in the model, as `blocks.3`."""
    parameters: int
    """How many, those that several modules share once; without its experts'."""
    expert_parameters: int
    """Those of experts, which expert parallelism divides."""
    trainable: int
    """How many of both get a gradient."""
    parameter_bytes: int
    """Of both kinds, as the model keeps them."""
    split_parameters: int
    """How many of `parameters` tensor parallelism divides."""
    largest: int = 0
    """Of its largest parameter, how many elements."""


@dataclass(frozen=True)
class Kernel:
    """One operator of a step."""

    name: str
    """Of aten, without its overload: `addmm`."""
    kind: Kind
    phase: Phase
    unit: int
    """Its index in `Profile.units`."""
    dtype: str
    """What it computes in: `bfloat16`."""
    flops: float
    """Of a matrix product 2 m n k; of an attention all pairs of positions, or half of them if it is causal."""
    bytes: float
    """Read from and written to the device's memory, if nothing stays in a cache."""
    shape: tuple[int, int, int, int] | None
    """A matrix product: batch, m, n, k. An attention: batch x heads, queries, keys, width of a head."""
    split: bool
    """Whether tensor parallelism divides its work."""
    sequence: bool
    """Whether sequence parallelism divides its work: what lies between the split parts of a layer."""
    expert: bool
    """Whether it is an expert's, and expert parallelism sends it the tokens of other ranks."""
    recomputed: bool = False
    """Whether it recomputes, in the backward pass, what the forward pass has not saved."""


@dataclass(frozen=True)
class Storage:
    """One tensor's memory from its birth to its end, in the order of the step."""

    bytes: float
    born: int
    """Index of the kernel that made it; -1: it is there before the step."""
    died: int
    """Index of the kernel behind which it is free; `len(kernels)`: it outlives the step."""
    forward: int
    """Index of the last kernel of the forward pass that read it; -1: none did."""
    maker: str
    """The operator that made it."""
    kind: Literal["parameter", "buffer", "gradient", "optimizer", "activation", "input"]
    unit: int
    split: bool
    sequence: bool
    expert: bool


@dataclass(frozen=True)
class Profile:
    """A traced step: forward, backward and optimizer of one micro-batch, with or without recomputation."""

    units: tuple[Unit, ...]
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]
    rows: int
    """Samples in the micro-batch."""
    tokens: int
    """Positions in the micro-batch: rows x the length of the sequence; rows for a job that has none."""
    width_bytes: float
    """What passes from one unit to the next in the forward pass, of the full micro-batch."""
    checkpointing: str = "none"

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters, as the run keeps them."""
        return sum(one.parameter_bytes for one in self.units)

    @property
    def optimizer_bytes(self) -> float:
        """Of all states of the optimizer."""
        return sum(one.bytes for one in self.storages if one.kind == "optimizer")

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(one.parameters + one.expert_parameters for one in self.units)
