"""DeepSpeed's ZeRO stages as a plugin: what it works with, and its checks before a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.errors import ConfigError
from fairlead.findings import Inexact
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.deepspeed.settings import (
    WHERE,
    auto_settings,
    conflicts,
    nvme_findings,
    settings_of,
    sixteen_bits,
    uses_nvme,
)
from fairlead_strategies.shared import LightningStrategy

LOSS_SCALE: Final = frozenset({"init_scale", "growth_interval", "growth_factor", "backoff_factor"})
"""Settings of torch's gradient scaler, as a precision has them."""


RESUMED: Final = frozenset(
    {
        "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "activation_checkpointing",
        "steps_per_print", "bf16", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
        "train_micro_batch_size_per_gpu",
    }
)  # fmt: skip
"""Parts of DeepSpeed's configuration with which a resumed run ends with the same bits."""


class DeepSpeed(LightningStrategy):
    """ZeRO data parallelism by DeepSpeed, on CUDA GPUs and on CPUs."""

    config = DeepSpeedStrategyConfig
    runtime = "fairlead_strategies.deepspeed.runtime:build"
    sharded_state = True
    precision = "deepspeed"
    engines = (*LIGHTNING, "deepspeed")
    extra = "deepspeed"
    codes: ClassVar[Mapping[str, str]] = {
        "deepspeed-config": "DeepSpeed's own configuration cannot be read, or holds what DeepSpeed does not know.",
        "deepspeed-conflict": "DeepSpeed's own configuration and the trainer say different things.",
        "deepspeed-environment": "The variable PL_DEEPSPEED_CONFIG_PATH is set, and has no effect.",
        "deepspeed-nvme": "This machine cannot offload to NVMe: the folder is missing.",
        "deepspeed-precision": "DeepSpeed does not compute in this precision on this device.",
        "deepspeed-optimizer": "DeepSpeed's configuration names an optimizer or a schedule.",
        "precision-scaler": "The strategy does not use the gradient scaler's settings.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning's DeepSpeed strategy refuses, or takes no notice of."""
        yield self.no(
            ("accelerator.mps", "accelerator.xla"),
            "DeepSpeed runs here on CUDA GPUs and on CPUs",
            "accelerator: cuda or cpu",
        )
        yield self.no(
            ("precision.64-true", "precision.bitsandbytes", "precision.fp8-torchao", "precision.transformer-engine"),
            "DeepSpeed does backward and step itself, through its own precision plugin, which has no such mode",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )
        yield self.no(("clipping.value",), "DeepSpeed clips gradients by norm only", "gradient_clip_algorithm: norm")
        yield Capability(
            "strategy.deepspeed",
            ("checkpoint_io.async",),
            "partial",
            "DeepSpeed writes a folder of checkpoint files itself, past the checkpoint IO: saving blocks training",
            "checkpoint_io: torch",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A variable that Lightning obeys silently, and settings of the loss scale that DeepSpeed does not read."""
        config = resolution.strategy
        assert isinstance(config, DeepSpeedStrategyConfig)
        path = environ.get("PL_DEEPSPEED_CONFIG_PATH")
        if path is not None and config.config is None:
            yield Finding(
                "warning",
                "deepspeed-environment",
                f"PL_DEEPSPEED_CONFIG_PATH={path} has no effect",
                where="trainer.strategy",
                why="Lightning's own strategy reads it; here the job says what DeepSpeed is configured with",
                fix=f"unset PL_DEEPSPEED_CONFIG_PATH, or write `config: {path}`",
            )
        yield from self._own_configuration(config, resolution, environ)
        if resolution.device_type == "cpu":
            yield from _not_on_cpus(resolution)
        fields: dict[str, Any] = getattr(type(resolution.precision), "model_fields", {})  # None: it is not installed
        if any(getattr(resolution.precision, name) != fields[name].default for name in LOSS_SCALE & fields.keys()):
            yield Finding(
                "error",
                "precision-scaler",
                "DeepSpeed does not use these settings of the loss scale",
                where="trainer.precision",
                why="it scales the loss itself",
                fix="set `loss_scale`, `initial_scale_power` and `loss_scale_window` of the strategy instead",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Each rank writes its part of weights and moments as they are, and reads it back; gloo adds in one order."""
        config = resolution.strategy
        assert isinstance(config, DeepSpeedStrategyConfig)
        if resolution.backend != "gloo":
            yield _not_known(f"strategy: deepspeed over {resolution.backend}", "no test has resumed it on GPUs")
        try:
            settings = settings_of(config, resolution.device_type)
        except ConfigError:
            return  # an error of the check
        if uses_nvme(settings):
            yield _not_known("strategy: deepspeed with state on NVMe", "no test has resumed it")
        if others := sorted(settings.keys() - RESUMED):
            yield _not_known(f"DeepSpeed's {', '.join(others)}", "no test has resumed a run that sets it")
        if config.load_full_weights:
            yield Inexact(
                "trainer.strategy.load_full_weights",
                why="a file of full weights has no optimizer state",
                fix="leave it out, and resume from the folder that DeepSpeed wrote",
            )

    def _own_configuration(
        self, config: DeepSpeedStrategyConfig, resolution: Resolution, environ: Mapping[str, str]
    ) -> Iterator[Finding]:
        """What DeepSpeed is configured with, against the trainer and this machine."""
        try:
            settings = settings_of(config, resolution.device_type)
        except ConfigError as error:
            yield Finding.of(error, "error", "deepspeed-config")
            return
        yield from conflicts(settings, resolution)
        for path in auto_settings(settings):
            yield Finding(
                "error",
                "deepspeed-config",
                f"{path} is `auto` in DeepSpeed's configuration",
                where=f"{WHERE}.{path}",
                why="only the Trainer of Transformers replaces it; DeepSpeed itself does not know it",
                fix="write the value, or leave it out",
            )
        for name in ("optimizer", "scheduler"):
            if name in settings:
                yield Finding(
                    "info",
                    "deepspeed-optimizer",
                    f"DeepSpeed's own {name} replaces the one of `configure_optimizers`",
                    where=f"{WHERE}.{name}",
                    why="DeepSpeed's configuration names one",
                    fix=f"leave {name} out, where the module's own is meant",
                )
        yield from nvme_findings(settings, here=resolution.inside_job)


def _not_on_cpus(resolution: Resolution) -> Iterator[Finding]:
    """Formats in which DeepSpeed computes on GPUs only."""
    computes = sixteen_bits(resolution.precision)
    reason = None
    if computes == "fp16":
        reason = "its accelerator for CPUs says that it has no such numbers"
    elif computes == "bf16" and resolution.precision.name == "mixed":
        reason = "torch computes norms in 32 bits then, which on a CPU does not work with 16-bit weights"
    if reason is not None:
        yield Finding(
            "error",
            "deepspeed-precision",
            f"DeepSpeed does not compute in {computes} with this precision on a CPU",
            where="trainer.precision",
            why=reason,
            fix="precision: bf16-true, or 32-true",
        )


def _not_known(what: str, why: str) -> Inexact:
    return Inexact(what, why=why, fix="strategy: fsdp2, or ddp", certain=False)


deepspeed = DeepSpeed()
deepspeed_stage_1 = DeepSpeed(stage=1)
deepspeed_stage_2 = DeepSpeed(stage=2)
deepspeed_stage_3 = DeepSpeed(stage=3)
deepspeed_stage_2_offload = DeepSpeed(stage=2, offload_optimizer=True)
deepspeed_stage_3_offload = DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True)
deepspeed_stage_3_offload_nvme = DeepSpeed(
    stage=3,
    offload_optimizer=True,
    offload_parameters=True,
    offload_params_device="nvme",
    offload_optimizer_device="nvme",
)
