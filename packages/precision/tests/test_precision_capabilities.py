"""Every row of the capability table that this machine can show: what Lightning or torch really do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import create_model

from fairlead import (
    BuildContext,
    Capability,
    PluginManager,
    PrecisionConfigBase,
    PrecisionPlugin,
    StrategyConfigBase,
    StrategyPlugin,
)
from fairlead.checks import capability_table
from fairlead.errors import ConfigError
from fairlead.testing import FakeEntryPoint
from fairlead_precision import (
    BitsandbytesPrecisionConfig,
    DeepSpeedPrecisionConfig,
    MixedPrecisionConfig,
    XLAPrecisionConfig,
)
from fairlead_precision.mixed import build as build_mixed

Build = Callable[..., Any]


def row(plugins: PluginManager, name: str, other: str) -> str:
    """The support of a row, which has a reason and a way out."""
    rows = [row for row in capability_table(plugins)[0] if row.subject == f"precision.{name}"]
    found: Capability = next(r for r in rows if other in r.others)
    assert found.reason
    assert found.fix
    return found.support


def test_float16_mixed_on_a_cpu_would_become_bfloat16(plugins: PluginManager) -> None:
    import lightning.pytorch as pl

    assert row(plugins, "16-mixed", "accelerator.cpu") == "no"
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer = pl.Trainer(accelerator="cpu", precision="16-mixed", logger=False, enable_checkpointing=False)
    assert trainer.precision == "bf16-mixed"


def test_float16_parameters_become_nan_with_adam(plugins: PluginManager) -> None:
    """The reason of the row `16-true` on a CPU, and that its advice helps."""
    import torch

    assert row(plugins, "16-true", "accelerator.cpu") == "partial"
    for eps, finite in ((1e-8, False), (1e-4, True)):
        parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        torch.optim.Adam([parameter], eps=eps).step()
        assert bool(parameter.isfinite().all()) is finite


def test_bitsandbytes_on_a_cpu(plugins: PluginManager, build: Build) -> None:
    """Lightning refuses its own plugin there, and takes ours, which trains: `test_bitsandbytes.py`."""
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import BitsandbytesPrecision as FabricBitsandbytesPrecision
    from lightning.pytorch.plugins.precision import BitsandbytesPrecision

    rows = [row for row in capability_table(plugins)[0] if row.subject == "precision.bitsandbytes"]
    assert {other: row.support for row in rows for other in row.others} == {
        "accelerator.cpu": "yes",
        "accelerator.mps": "no",
        "accelerator.xla": "no",
    }
    assert all(row.reason for row in rows)
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs"):
        # Its constructor needs bitsandbytes; the refusal looks at the class alone.
        pl.Trainer(accelerator="cpu", plugins=[object.__new__(BitsandbytesPrecision)])
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs"):
        Fabric(accelerator="cpu", plugins=[object.__new__(FabricBitsandbytesPrecision)])
    ours = build(BitsandbytesPrecisionConfig())
    assert pl.Trainer(accelerator="cpu", plugins=[ours], logger=False).precision_plugin is ours


def test_torchaos_8_bits_on_a_cpu_are_said_to_be_emulated(plugins: PluginManager) -> None:
    assert row(plugins, "fp8-torchao", "accelerator.cpu") == "partial"
    assert row(plugins, "fp8-torchao", "accelerator.xla") == "no"


def test_deepspeeds_precision_elsewhere(plugins: PluginManager, build: Build) -> None:
    """It calls `step` on what should be DeepSpeed's engine."""
    import torch

    assert row(plugins, "deepspeed", "strategy.ddp") == "no"
    plugin = build(DeepSpeedPrecisionConfig(), strategy="ddp")
    module: Any = torch.nn.Linear(1, 1)
    model: Any = SimpleNamespace(trainer=SimpleNamespace(model=module), automatic_optimization=True)
    plugin._after_closure = lambda *args: None
    with pytest.raises(AttributeError, match="has no attribute 'step'"):
        plugin.optimizer_step(None, model, lambda: torch.ones(1))


def test_fsdps_precision_elsewhere(plugins: PluginManager) -> None:
    """`tensor_parallel` and others would miss overflows in its mode 16-mixed."""
    assert row(plugins, "fsdp", "strategy.tensor_parallel") == "no"
    rows = [row for row in capability_table(plugins)[0] if row.subject == "precision.fsdp"]
    assert not any("strategy.fsdp" in row.others for row in rows)


def test_xlas_precision_needs_torch_xla(plugins: PluginManager, build: Build) -> None:
    assert row(plugins, "xla", "strategy.ddp") == "no"
    for engine in ("trainer", "fabric"):
        with pytest.raises(ModuleNotFoundError, match="torch_xla"):
            build(XLAPrecisionConfig(), engine, strategy="xla")


@pytest.mark.parametrize("name", ["deepspeed", "xla"])
def test_a_strategys_own_precision_is_refused_by_every_other(plugins: PluginManager, name: str) -> None:
    """Of those that are installed, a third party's too: it needs no line in this package."""
    ring = type("Ring", (StrategyPlugin,), {"config": strategy_config("ring")})
    sharded = type("Sharded", (StrategyPlugin,), {"config": strategy_config("sharded"), "precision": name})
    third = [FakeEntryPoint("strategy.ring", ring()), FakeEntryPoint("strategy.sharded", sharded())]
    more = PluginManager([*importlib.metadata.entry_points(group="fairlead"), *third])
    assert row(more, name, "strategy.ring") == "no"
    refused = {other for row in capability_table(more)[0] if row.subject == f"precision.{name}" for other in row.others}
    assert refused == {f"strategy.{tag}" for tag in more.distinct("strategy")} - {
        f"strategy.{name}",
        "strategy.sharded",
    }


def strategy_config(name: str) -> type[StrategyConfigBase]:
    tag: Any = Literal[name]
    return create_model("Config", __base__=StrategyConfigBase, name=(tag, name))


def test_a_third_partys_strategy_brings_its_own_precision(resolution: Any) -> None:
    """General names are built as the precision that the strategy names, and refused where that has no such mode."""

    class RingPrecisionConfig(PrecisionConfigBase):
        name: Literal["ring"] = "ring"
        precision: Literal["32-true", "16-mixed"] = "32-true"

    class RingPrecision(PrecisionPlugin):
        config = RingPrecisionConfig
        runtime = f"{__name__}:built"

    ring = type("Ring", (StrategyPlugin,), {"config": strategy_config("ring"), "precision": "ring"})
    third = [FakeEntryPoint("strategy.ring", ring()), FakeEntryPoint("precision.ring", RingPrecision())]
    plugins = PluginManager([*importlib.metadata.entry_points(group="fairlead"), *third])
    chosen = MixedPrecisionConfig(dtype="float16", init_scale=8.0)
    made = build_mixed(chosen, BuildContext(resolution(chosen, "ring"), {}, plugins))
    assert (made["mode"], made["scaler"]["init_scale"]) == ("16-mixed", 8.0)
    with pytest.raises(ConfigError, match="strategy 'ring' does not know precision 'bf16-mixed'") as caught:
        build_mixed(MixedPrecisionConfig(), BuildContext(resolution(MixedPrecisionConfig(), "ring"), {}, plugins))
    assert caught.value.fix == "choose one of: 32-true, 16-mixed"


def built(config: Any, context: BuildContext) -> dict[str, Any]:
    return {"mode": config.precision, "scaler": context.extras["scaler"]}
