"""What `deepspeed` and its presets contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Finding, StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.fields import LIGHTNING

__all__ = [
    "DeepSpeed",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
]


class DeepSpeed(StrategyPlugin):
    """ZeRO data parallelism by DeepSpeed, on CUDA GPUs (R37: its absence is said with the pip line)."""

    config = DeepSpeedStrategyConfig
    runtime = "fairlead_strategies.deepspeed.runtime:build"
    sharded_state = True
    precision = "deepspeed"
    engines = (*LIGHTNING, "deepspeed>=0.19.8")
    extra = "deepspeed"
    codes: ClassVar[Mapping[str, str]] = {
        "deepspeed-environment": "The variable PL_DEEPSPEED_CONFIG_PATH replaces the strategy's settings.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning's DeepSpeed strategy refuses, or takes no notice of."""

        def row(support: str, others: tuple[str, ...], reason: str, fix: str) -> Capability:
            return Capability("strategy.deepspeed", others, "no" if support == "no" else "partial", reason, fix)

        yield row(
            "no",
            ("accelerator.cpu", "accelerator.mps", "accelerator.xla"),
            "Lightning runs DeepSpeed on CUDA GPUs only",
            "accelerator: cuda, or strategy: ddp",
        )
        yield row(
            "no",
            (
                "precision.64-true",
                "precision.bitsandbytes",
                "precision.transformer-engine",
                "precision.fsdp",
                "precision.xla",
            ),
            "DeepSpeed does backward and step itself, through its own precision plugin, which has no such mode",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )
        yield row("no", ("clipping.value",), "DeepSpeed clips gradients by norm only", "gradient_clip_algorithm: norm")
        yield row(
            "no",
            ("layer_sync.torch_sync_batchnorm",),
            "Lightning's DeepSpeed strategy does not apply it, and says nothing",
            "convert the model in its constructor: torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        )
        yield row(
            "partial",
            ("checkpoint_io.async",),
            "DeepSpeed writes a folder of checkpoint files itself, past the checkpoint IO: saving blocks training",
            "checkpoint_io: torch",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A variable that Lightning obeys silently."""
        config = resolution.strategy
        assert isinstance(config, DeepSpeedStrategyConfig)
        path = environ.get("PL_DEEPSPEED_CONFIG_PATH")
        if path is not None and config.config is None:
            yield Finding(
                "error",
                "deepspeed-environment",
                f"PL_DEEPSPEED_CONFIG_PATH={path} would replace every setting of the strategy",
                where="trainer.strategy",
                why="Lightning reads this variable when no `config` is given",
                fix=f"unset PL_DEEPSPEED_CONFIG_PATH, or write `config: {path}`",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "strategy: deepspeed",
            why="no test has resumed it: DeepSpeed keeps and writes its state itself",
            fix="strategy: fsdp2, or ddp",
            certain=False,
        )


deepspeed = DeepSpeed()
deepspeed_stage_1 = DeepSpeed(stage=1)
deepspeed_stage_2 = DeepSpeed(stage=2)
deepspeed_stage_3 = DeepSpeed(stage=3)
deepspeed_stage_2_offload = DeepSpeed(stage=2, offload_optimizer=True)
deepspeed_stage_3_offload = DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True)
