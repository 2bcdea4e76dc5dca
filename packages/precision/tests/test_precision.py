"""Configs, presets, and which of Lightning's plugins they become."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from fairlead import (
    PluginManager,
)
from fairlead.errors import ConfigError
from fairlead.open_union import parse_backend
from fairlead_precision import (
    BitsandbytesPrecisionConfig,
    DeepSpeedPrecisionConfig,
    FSDPPrecisionConfig,
    HalfPrecisionConfig,
    MixedPrecisionConfig,
    TorchAOFloat8PrecisionConfig,
    TransformerEnginePrecisionConfig,
    XLAPrecisionConfig,
)

Build = Callable[..., Any]


LABELS = {
    "32-true": "32-true",
    "32": "32-true",
    "64-true": "64-true",
    "64": "64-true",
    "half": "16-true",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
    "mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "bitsandbytes": "nf4",
    "nf4": "nf4",
    "nf4-dq": "nf4-dq",
    "fp4": "fp4",
    "fp4-dq": "fp4-dq",
    "int8": "int8",
    "int8-training": "int8-training",
    "fp8-torchao": "fp8-torchao",
    "transformer-engine": "transformer-engine",
    "transformer-engine-float16": "transformer-engine-float16",
    "xla": "xla",
}


@pytest.mark.parametrize("name", LABELS)
def test_every_literal_becomes_a_config_that_round_trips(plugins: PluginManager, name: str) -> None:
    """It is shown under its clearest name."""
    config = parse_backend("precision", name, plugins)
    for written in (config.model_dump(), json.loads(config.model_dump_json())):
        assert parse_backend("precision", written, plugins) == config
    assert plugins.label(config) == LABELS[name]


def test_no_literal_is_left_out(plugins: PluginManager) -> None:
    assert set(plugins.names("precision")) >= set(LABELS)


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("mixed", "MixedPrecisionPluginConfig"),
        ("half", "HalfPrecisionPluginConfig"),
        ("64-true", "DoublePrecisionPluginConfig"),
        ("fsdp", "FSDPPrecisionPluginConfig"),
        ("deepspeed", "DeepSpeedPluginConfig"),
        ("bitsandbytes", "BitsandbytesPluginConfig"),
        ("transformer-engine", "TransformerEnginePluginConfig"),
        ("xla", "XLAPluginConfig"),
    ],
)
def test_document_names(plugins: PluginManager, name: str, alias: str) -> None:
    assert alias in plugins.get("precision", name).aliases


@pytest.mark.parametrize(
    ("name", "extra", "engine"),
    [
        ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
        ("nf4-dq", "bitsandbytes", "bitsandbytes"),
        ("fp8-torchao", "torchao", "torchao"),
        ("transformer-engine", "transformer-engine", "transformer-engine"),
        ("deepspeed", "deepspeed", "deepspeed"),
        ("xla", "xla", "torch-xla"),
    ],
)
def test_optional_engines_are_declared(plugins: PluginManager, name: str, extra: str, engine: str) -> None:
    """The core makes the pip line from these."""
    plugin = plugins.get("precision", name)
    assert plugin.extra == extra
    assert engine in plugin.engines


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (HalfPrecisionConfig, {"dtype": "float32"}, "float16"),
        (MixedPrecisionConfig, {"dtype": "bfloat16", "init_scale": 8.0}, "belongs to float16"),
        (MixedPrecisionConfig, {"dtype": "float16", "backoff_factor": 1.0}, "less than 1"),
        (FSDPPrecisionConfig, {"precision": "64-true"}, "bf16-mixed"),
        (DeepSpeedPrecisionConfig, {"precision": "64-true"}, "bf16-mixed"),
        (XLAPrecisionConfig, {"precision": "16-mixed"}, "bf16-true"),
        (BitsandbytesPrecisionConfig, {"mode": "int4"}, "nf4"),
        (BitsandbytesPrecisionConfig, {"mode": "int8", "dtype": "bfloat16"}, "float16 only"),
        (BitsandbytesPrecisionConfig, {"mode": "nf4", "threshold": 3.0}, "int8 modes"),
        (BitsandbytesPrecisionConfig, {"mode": "int8", "threshold": -1.0}, "greater than or equal"),
        (BitsandbytesPrecisionConfig, {"ignore_modules": "lm_head"}, "valid tuple"),
        (TorchAOFloat8PrecisionConfig, {"recipe": "delayed"}, "tensorwise"),
        (TorchAOFloat8PrecisionConfig, {"compute": "16-mixed"}, "bf16-mixed"),
        (TransformerEnginePrecisionConfig, {"recipe": {"margn": 1}}, "Extra inputs"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(kind: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        kind.model_validate(fields)


MODES = ["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]


@pytest.mark.filterwarnings("ignore:.*is enabled, but CUDA is not available:UserWarning")
@pytest.mark.parametrize("engine", ["trainer", "fabric"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp2", "fsdp", "deepspeed"])
@pytest.mark.parametrize("mode", MODES)
def test_the_plugin_that_fits_the_strategy_is_built(
    plugins: PluginManager, engine: str, strategy: str, mode: str, build: Build
) -> None:
    """The same choice as Lightning makes for its own literals."""
    import lightning.fabric.plugins.precision as fabric
    import lightning.pytorch.plugins.precision as trainer

    family = trainer if engine == "trainer" else fabric
    config: Any = parse_backend("precision", mode, plugins)
    own = {"deepspeed": family.DeepSpeedPrecision}
    general = {"32-true": family.Precision, "64-true": family.DoublePrecision}
    kind: Any = own.get(strategy) or general.get(mode)
    kind = kind or (family.HalfPrecision if mode.endswith("-true") else family.MixedPrecision)
    if strategy in own and mode == "64-true":
        with pytest.raises(ConfigError, match="does not know precision '64-true'"):
            build(config, engine, strategy=strategy)
        return
    plugin = build(config, engine, strategy=strategy)
    assert type(plugin) is kind
    assert plugin.precision == mode


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
@pytest.mark.parametrize(
    "config", [FSDPPrecisionConfig(precision="bf16-true"), DeepSpeedPrecisionConfig(precision="bf16-true")]
)
def test_a_strategys_own_precision_can_be_named(engine: str, config: Any, build: Build) -> None:
    assert build(config, engine, strategy=config.name).precision == "bf16-true"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_the_gradient_scaler_is_the_configs(engine: str, strategy: str, build: Build) -> None:
    config = MixedPrecisionConfig(dtype="float16", init_scale=1024.0, growth_interval=5, backoff_factor=0.25)
    plugin = build(config, engine, strategy=strategy, accelerator="cpu")
    scaler = plugin.scaler
    assert (scaler._init_scale, scaler._growth_interval) == (1024.0, 5)
    assert scaler.get_backoff_factor() == 0.25
    assert type(scaler).__name__ == "GradScaler"


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # Lightning's use of torch
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_64_bit_training_is_64_bit_throughout(plugins: PluginManager, build: Build) -> None:
    """Parameters, gradients and inputs, through a real Trainer; and it equals plain torch in float64."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.seen: set[torch.dtype] = set()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            self.seen.add(batch[0].dtype)
            loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen |= {p.grad.dtype for p in self.parameters() if p.grad is not None}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    module = Net()
    reference = nn.Linear(3, 1).double()
    reference.load_state_dict({name: value.double() for name, value in module.layer.state_dict().items()})
    config: Any = parse_backend("precision", "64-true", plugins)
    plugin = build(config, strategy="single_device")
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, plugins=[plugin], enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=8))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(data.double()).pow(2).mean().backward()
    optimizer.step()
    assert module.seen == {torch.float64}
    torch.testing.assert_close(module.layer.weight, reference.weight, rtol=1e-14, atol=0)


def test_configs_and_plugins_import_no_torch() -> None:
    """Rule 1: in a fresh interpreter."""
    code = (
        "import sys; from fairlead import PluginManager; p = PluginManager(); "
        "r = [r for r in p.records('precision', load=True) if r.error]; "
        "engines = ('torch', 'lightning', 'numpy', 'deepspeed', 'bitsandbytes', 'torchao'); "
        "print(r, [m for m in engines if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
