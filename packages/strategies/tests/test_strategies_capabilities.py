"""Every `no` of the capability table that this machine can show: what Lightning or torch really do."""

from __future__ import annotations

import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest

from fairlead import Capability, PluginManager
from fairlead_strategies import DDPStrategyConfig, DeepSpeedStrategyConfig, FSDP2StrategyConfig, FSDPStrategyConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of deepspeed's own imports
PARALLEL = [DDPStrategyConfig(), FSDPStrategyConfig(), FSDP2StrategyConfig(), DeepSpeedStrategyConfig()]


def table() -> dict[tuple[str, str], Capability]:
    plugins, rows = PluginManager(), {}
    for tag in ("single_device", "ddp", "fsdp", "fsdp2", "deepspeed", "xla"):
        for result in plugins.call(plugins.get("strategy", tag), "fairlead_capabilities", plugins=plugins):
            rows.update({(row.subject.removeprefix("strategy."), other): row for row in result for other in row.others})
    return rows


def build(config: Any, context: Any) -> Any:
    return pkgutil.resolve_name(str(PluginManager().of(config).runtime))(config, context)


def refuses(*pairs: tuple[str, str], support: str = "no") -> None:
    """The table has these rows, each with a reason and a way out."""
    rows = table()
    for pair in pairs:
        assert rows[pair].support == support
        assert rows[pair].reason
        assert rows[pair].fix


def test_the_table_does_not_refuse_what_the_training_tests_show_to_work() -> None:
    rows = table()
    for strategy in ("ddp", "fsdp", "fsdp2"):
        for other in (
            "accelerator.cpu",
            "precision.32-true",
            "precision.bf16-mixed",
            "clipping.norm",
            "clipping.value",
        ):
            assert (strategy, other) not in rows
    assert ("fsdp", "precision.16-mixed") not in rows


@pytest.mark.parametrize("config", PARALLEL, ids=lambda config: config.name)
def test_parallel_strategies_on_mps(ranks: ModuleType, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import MPSAccelerator

    refuses((config.name, "accelerator.mps"))
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    with pytest.raises(ValueError, match="not supported on the MPS accelerator"):
        pl.Trainer(accelerator="mps", devices=1, strategy=build(config, ranks.context(config)))


def test_other_strategies_on_xla() -> None:
    """Lightning's own refusal needs torch-xla: `integration_tests/xla`."""
    refuses(*[(tag, "accelerator.xla") for tag in ("single_device", "ddp", "fsdp", "fsdp2", "deepspeed")])


def test_lightnings_own_deepspeed_on_a_cpu() -> None:
    """Why there is a class of our own, which is trained elsewhere: once this fails, part of it can go."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy

    assert ("deepspeed", "accelerator.cpu") not in table()
    strategy = DeepSpeedStrategy(stage=1)
    strategy.accelerator = CPUAccelerator()
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs"):
        strategy.setup_environment()


def test_deepspeed_has_five_precisions() -> None:
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision

    kinds = ("64-true", "bitsandbytes", "transformer-engine")
    refuses(*[("deepspeed", f"precision.{kind}") for kind in kinds])
    wrong: Any = "64-true"
    with pytest.raises(ValueError, match="is not supported"):
        DeepSpeedPrecision(wrong)


def test_deepspeed_does_not_clip_by_value(ranks: ModuleType) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    refuses(("deepspeed", "clipping.value"))
    config = DeepSpeedStrategyConfig()
    strategy = build(config, ranks.context(config))
    module = pl.LightningModule()
    module.trainer = pl.Trainer(
        accelerator="cpu",
        gradient_clip_val=1.0,
        gradient_clip_algorithm="value",
        logger=False,
        enable_checkpointing=False,
    )
    strategy._lightning_module = module
    with pytest.raises(MisconfigurationException, match="does not support clipping gradients by value"):
        strategy.init_deepspeed()


def test_deepspeed_writes_past_the_checkpoint_io() -> None:
    """The word is not in the method that would have to use it."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    refuses(("deepspeed", "checkpoint_io.async"), support="partial")
    assert "checkpoint_io" not in inspect.getsource(DeepSpeedStrategy.save_checkpoint)
    assert ("deepspeed", "layer_sync.torch_sync_batchnorm") not in table()  # ours applies it, and is trained with it


def test_xla_accepts_its_own_precision_and_checkpoint_io_only() -> None:
    """Lightning's own refusal of another plugin needs torch-xla: `integration_tests/xla`."""
    from typing import get_args

    from lightning.fabric.plugins.precision.xla import _PRECISION_INPUT

    modes = ("64-true", "16-mixed", "bf16-mixed")
    kinds = ("bitsandbytes", "transformer-engine")
    refuses(*[("xla", f"precision.{name}") for name in (*modes, *kinds)], ("xla", "checkpoint_io.torch"))
    assert not set(modes) & set(get_args(_PRECISION_INPUT))
