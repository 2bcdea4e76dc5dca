"""What is decided, said and refused where PJRT drives the devices; the real torch_xla, in this process too."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead import BuildContext, PluginManager
from fairlead.checks import check_trainer
from fairlead.config import TrainerConfig
from fairlead.exactness import device_reasons, verdict
from fairlead_distributed.predictions.reading import Predictions
from integration_tests.jobs import fairlead
from integration_tests.xla.small import LAYOUTS, SPLIT, newest, repository, run, state, tensors

FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def resolved(environ: Mapping[str, str], **trainer: Any) -> Any:
    resolution, findings = check_trainer(
        TrainerConfig.model_validate(trainer), environ=environ, plugins=PluginManager(), purpose="run"
    )
    assert [one for one in findings if one.severity == "error"] == []
    return resolution


@pytest.mark.parametrize("trainer", [{}, {"strategy": "xla"}, {"accelerator": "tpu"}])
def test_what_has_one_right_answer_is_resolved_with_its_reason(trainer: dict[str, Any]) -> None:
    resolution = resolved(FOUR, **trainer)
    said = {name: (one.value, one.reason) for name, one in resolution.settings.items()}
    assert said["environment"] == ("xla", "PJRT_DEVICE=CPU")
    assert said["accelerator"][0] == said["strategy"][0] == "xla"
    assert said["devices"] == (4, "PJRT_DEVICE=CPU, CPU_NUM_DEVICES=4")
    assert said["world_size"] == (1, "one process drives all 4 devices (strategy xla)")
    assert said["checkpoint_io"] == ("xla", "the strategy xla accepts no other")
    assert (resolution.devices, resolution.devices_per_rank) == (1, 4)
    assert verdict(device_reasons(resolution, PluginManager())) == "exact"


def test_explain_says_so(tmp_path: Path) -> None:
    repository(tmp_path)
    call = run(tmp_path, devices=4, command="explain")
    assert call.code == 0, call.text
    lines = [" ".join(line.split()) for line in call.out.splitlines()]
    for line in (
        "environment xla PJRT_DEVICE=CPU",
        "accelerator xla the strategy xla drives no other",
        "devices 4 PJRT_DEVICE=CPU, CPU_NUM_DEVICES=4",
        "world_size 1 one process drives all 4 devices (strategy xla)",
        "checkpoint_io xla the strategy xla accepts no other",
        "global_batch 8 8 per process of 4 devices",
    ):
        assert line in lines, call.out
    assert any(line.startswith("batch_per_device 2 8 / 4 devices") for line in lines), call.out


@pytest.mark.parametrize(
    ("settings", "environ", "wanted"),
    [
        ((), {"PJRT_DEVICE": ""}, ("PJRT_DEVICE names no other device, such as CPU", "strategy: auto")),
        (("trainer.devices=3",), {}, ("one process is to drive 3 XLA devices, but it sees 4", "CPU_NUM_DEVICES")),
        (("trainer.precision=16-mixed",), {}, ("does not work with precision '16-mixed'", "precision: bf16-true")),
        (("trainer.strategy=ddp",), {}, ("strategy 'ddp' does not work with accelerator 'xla'", "strategy: xla")),
        (("trainer.checkpoint_io=torch",), {}, ("does not work with", "checkpoint_io: xla")),
    ],
)
def test_a_mistake_is_an_error_with_a_way_out(
    settings: tuple[str, ...], environ: dict[str, str], wanted: tuple[str, str], tmp_path: Path
) -> None:
    repository(tmp_path)
    call = run(tmp_path, *settings, devices=4, **environ)
    assert call.code == 2, call.text
    assert wanted[0] in call.text
    assert wanted[1] in call.text
    assert "Traceback" not in call.text


def test_a_batch_that_cannot_be_split_is_trained_and_said(tmp_path: Path) -> None:
    repository(tmp_path)
    call = run(tmp_path, "data.args.batch_size=6", "trainer.max_steps=2", SPLIT, devices=4)
    assert call.code == 0, call.text
    assert "a batch of 6 cannot be split evenly over 4 devices" in call.text
    assert "a batch size of 4 or 8" in call.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_and_predict_take_the_checkpoint_and_so_does_plain_torch(layout: str, tmp_path: Path) -> None:
    devices, settings = LAYOUTS[layout]
    repository(tmp_path)
    assert run(tmp_path, *settings, "trainer.max_steps=4", devices=devices).code == 0
    path = tmp_path / "runs" / "small"
    trained = ("--resume", "last")
    call = run(tmp_path, *settings, command="predict", devices=devices, more=trained)
    assert call.code == 0, call.text
    weights = {name.removeprefix("net."): one for name, one in state(newest(path))["state_dict"].items()}
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        torch.nn.Linear(32, 1),
    )
    net.load_state_dict(weights)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        outputs = net.eval()(x)[:, 0]
        loss = torch.nn.functional.mse_loss(outputs, x[:, :4].sum(1))
    torch.testing.assert_close(Predictions(path / "predictions-1").to_torch(), outputs, rtol=1e-4, atol=1e-5)
    call = run(tmp_path, *settings, command="test", devices=devices, more=trained)
    assert call.code == 0, call.text
    assert float(call.out.split()[-1]) == pytest.approx(float(loss), rel=1e-4)
    with (path / "metrics.csv").open(newline="") as file:
        validated = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]][-1]
    assert validated == pytest.approx(float(loss), rel=1e-4)


def test_a_checkpoint_of_four_devices_goes_on_on_one(tmp_path: Path) -> None:
    """The file holds whole tensors; a run may move."""
    repository(tmp_path)
    assert run(tmp_path, SPLIT, devices=4, STOP="SIGTERM:4").code == 75
    call = run(tmp_path, SPLIT, devices=1)
    assert call.code == 0, call.text
    assert all(one.isfinite().all() for one in tensors(state(newest(tmp_path / "runs" / "small"))).values())


LOOP = """
import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run, TrainerConfig, fabric

split, precision, stop = sys.argv[1:]
strategy = {"name": "xla", "sharding_strategy": split}
fab = fabric(TrainerConfig.model_validate({"strategy": strategy, "precision": precision}))
fab.launch()
torch.manual_seed(1)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model, optimizer = fab.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
loader = DataLoader(data, batch_size=8, shuffle=True)
every = {"every_n_steps": 3}
with Run("runs/loop", max_epochs=2, model=model, optimizer=optimizer, checkpoint=every, log_every_n_steps=1) as run:
    run.restore()
    for inputs, targets in run.batches(loader):
        loss = torch.nn.functional.mse_loss(model(fab.to_device(inputs)), fab.to_device(targets))
        fab.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(**{"train/loss": loss})
        if run.steps == int(stop):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("devices", "split", "precision"), [(1, "NO_SHARD", "bf16-true"), (4, "FULL_SHARD", "32-true")]
)
def test_a_custom_training_loop_resumes_with_the_same_bits(
    devices: int, split: str, precision: str, tmp_path: Path
) -> None:
    for name, stops in (("whole", ["0"]), ("cut", ["8", "0"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loop.py").write_text(LOOP)
        for stop in stops:
            call = fairlead(
                "loop.py",
                split,
                precision,
                stop,
                cwd=tmp_path / name,
                environ={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)},
                command=(sys.executable,),
            )
            assert call.code == (0 if stop == "0" else -9), call.text
    rows = [(tmp_path / name / "runs/loop/metrics.csv").read_text() for name in ("whole", "cut")]
    assert rows[0] == rows[1]
    files = [newest(tmp_path / name / "runs/loop") for name in ("whole", "cut")]
    left, right = (
        {path.name: tensors(torch.load(path, weights_only=True)) for path in one.rglob("*.ckpt")} for one in files
    )
    assert left.keys() == right.keys()
    assert sum(map(len, left.values())) > 4
    for name, one in left.items():
        assert all(torch.equal(tensor, right[name][key]) for key, tensor in one.items())


@pytest.fixture
def on_xla(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    return PluginManager()


def test_the_accelerator_is_there_where_lightnings_asks_for_a_tpu(on_xla: PluginManager) -> None:
    from lightning.pytorch.accelerators import XLAAccelerator

    from fairlead.backends import build_backend

    resolution = resolved({"PJRT_DEVICE": "CPU"})
    ours = build_backend(resolution.accelerator, BuildContext(resolution, {}, on_xla))
    assert isinstance(ours, XLAAccelerator)
    assert type(ours).is_available()
    assert not XLAAccelerator.is_available()
    assert type(ours).auto_device_count() == 1
    assert set(ours.get_device_stats(torch.device("xla", 0))) <= {"avg. free memory (MB)", "avg. peak memory (MB)"}


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_other_strategies_and_plugins_are_refused_by_lightning_too(on_xla: PluginManager, engine: str) -> None:
    """The reasons of the capability table, from Lightning itself."""
    import lightning.fabric as lf
    import lightning.pytorch as pl
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning.pytorch.plugins.precision import MixedPrecision

    from fairlead.backends import build_backend

    resolution = resolved({"PJRT_DEVICE": "CPU"})
    context = BuildContext(resolution, {}, on_xla, engine=engine)  # type: ignore[arg-type]
    kind = pl.Trainer if engine == "trainer" else lf.Fabric
    for strategy in ("ddp", "auto"):
        accelerator = build_backend(resolution.accelerator, context)
        other: Any = strategy
        if strategy == "auto":
            from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingle
            from lightning.pytorch.strategies import SingleDeviceStrategy

            other = SingleDeviceStrategy() if engine == "trainer" else FabricSingle()
        with pytest.raises(ValueError, match="can only be used with a `SingleDeviceXLAStrategy`"):
            kind(accelerator=accelerator, devices=1, strategy=other)
    ours = build_backend(resolution.strategy, context)
    with pytest.raises(TypeError, match="can only work with the `XLACheckpointIO` plugin"):
        ours.checkpoint_io = TorchCheckpointIO()
    mixed = (MixedPrecision if engine == "trainer" else FabricMixedPrecision)("bf16-mixed", "cpu")
    with pytest.raises(TypeError, match="can only work with the `XLAPrecision` plugin"):
        setattr(ours, "precision_plugin" if engine == "trainer" else "precision", mixed)


def test_the_checkpoint_file_holds_host_tensors_and_damage_is_seen(on_xla: PluginManager, tmp_path: Path) -> None:
    from lightning.fabric.plugins import XLACheckpointIO

    from fairlead.errors import CheckpointError
    from fairlead_checkpoint_io import XLACheckpointIOConfig
    from fairlead_checkpoint_io.xla_file_runtime import XLAFileCheckpointIO

    backend = XLAFileCheckpointIO(XLACheckpointIOConfig())
    assert isinstance(backend, XLACheckpointIO)  # Lightning's XLA strategies refuse anything else
    backend.save_checkpoint({"w": torch.ones(2, device="xla") * 3, "step": 1}, tmp_path / "x.ckpt")
    loaded = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert (loaded["w"].device.type, loaded["w"].tolist()) == ("cpu", [3.0, 3.0])
    assert backend.load_checkpoint(tmp_path / "x.ckpt")["step"] == 1
    (tmp_path / "x.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        backend.load_checkpoint(tmp_path / "x.ckpt")


def test_the_generator_of_the_device_is_seeded_saved_and_restored(on_xla: PluginManager) -> None:
    """`torch.manual_seed` leaves it alone, and each program goes on to another state."""
    import torch_xla

    from fairlead_distributed.rng import isolated_rng, rng_state, seed_xla, set_rng_state

    def draw() -> list[float]:
        numbers = torch.rand(3, device=torch_xla.device())
        torch_xla.sync()
        return [float(number) for number in numbers.cpu()]

    draw()
    seed_xla(7)
    first, saved = draw(), rng_state()
    second = draw()
    assert first != second
    set_rng_state(saved)
    with isolated_rng(seed=3):
        other = draw()
    assert draw() == second
    with isolated_rng(seed=3):
        assert draw() == other
    plain = {name: one for name, one in saved.items() if name != "xla"}
    set_rng_state(plain)  # of a run on another device
    seed_xla(7)
    assert draw() == first
