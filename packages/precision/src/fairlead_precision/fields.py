"""What several precisions share. Torch-free."""

from __future__ import annotations

from typing import Literal

__all__ = ["LIGHTNING", "OTHER_THAN_DEEPSPEED", "OTHER_THAN_FSDP", "OTHER_THAN_XLA", "Half", "Mode"]

LIGHTNING = ("torch>=2.13", "lightning>=2.6.6,<2.7")
"""The engines that every precision needs."""

Half = Literal["float16", "bfloat16"]
Mode = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
"""The modes of FSDP's and DeepSpeed's precision, under Lightning's names."""

OTHER_THAN_FSDP = (
    "strategy.single_device", "strategy.ddp", "strategy.fsdp2", "strategy.deepspeed", "strategy.xla",
)  # fmt: skip
OTHER_THAN_DEEPSPEED = (
    "strategy.single_device", "strategy.ddp", "strategy.fsdp", "strategy.fsdp2", "strategy.xla",
)  # fmt: skip
OTHER_THAN_XLA = (
    "strategy.single_device", "strategy.ddp", "strategy.fsdp", "strategy.fsdp2", "strategy.deepspeed",
)  # fmt: skip
