"""Accelerators: what is found without torch, by a made-up file system, and what is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlead.checks import capability_table, check_trainer
from fairlead.config import ResourcesConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.exactness import Verdict, device_reasons, verdict
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead.testing import minimal_resolution
from fairlead_lightning.accelerators.cuda import find_devices, nvidia
from fairlead_lightning.accelerators.cuda.nvidia import ask_nvidia_smi, nvidia_devices
from fairlead_lightning.accelerators.cuda.visible import GPU
from fairlead_lightning.accelerators.mps import find_devices as find_mps
from fairlead_lightning.accelerators.xla import find_devices as find_xla
from fairlead_lightning.accelerators.xpu import find_devices as find_xpu

INFORMATION = """Model: \t\t NVIDIA {model}
IRQ:   \t\t 11
GPU UUID: \t GPU-{minor}aaaa-bbbb
Bus Type: \t PCIe
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def machine(root: Path, models: list[str], nodes: list[int] | None = None) -> Path:
    """A machine with NVIDIA GPUs; `nodes`: the device files that exist, None: all."""
    for minor, model in enumerate(models):
        folder = root / f"proc/driver/nvidia/gpus/0000:{minor:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(model=model, minor=minor))
    (root / "dev").mkdir()
    for minor in range(len(models)) if nodes is None else nodes:
        (root / f"dev/nvidia{minor}").touch()
    for other in ("nvidiactl", "nvidia-uvm"):
        (root / "dev" / other).touch()
    return root


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0,2", 2),
        ("2, 0", 2),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("0,0", 0),
        ("GPU-1aaaa,GPU-3aaaa", 2),
        ("GPU-7", 0),
        ("MIG-1234,MIG-5678", 1),
        ("NoDevFiles", 0),
    ],
)
def test_cuda_visible_devices_is_read_as_the_driver_reads_it(tmp_path: Path, value: str | None, count: int) -> None:
    machine(tmp_path, ["H100"] * 4)
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    found = find_devices(environ, tmp_path, torch=None)
    assert found.count == count
    assert "/dev/nvidia*" in found.evidence
    if value is not None:
        assert f"CUDA_VISIBLE_DEVICES={value!r}" in found.evidence or not count
    assert found.names == ("NVIDIA H100",) * count


def test_a_container_counts_only_the_gpus_it_was_given(tmp_path: Path) -> None:
    machine(tmp_path, ["T4", "H100", "T4"], nodes=[1])
    found = find_devices({}, tmp_path, torch=None)
    assert (found.count, found.names) == (1, ("NVIDIA H100",))


def test_models_are_not_claimed_where_the_order_is_not_known(tmp_path: Path) -> None:
    machine(tmp_path, ["T4", "H100"])
    assert find_devices({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path, torch=None).names == ()
    ordered = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert find_devices(ordered, tmp_path, torch=None).names == ("NVIDIA T4",)


def test_nvidia_smi_decides_where_there_are_no_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, ["L4"], nodes=[])
    monkeypatch.setattr(nvidia, "ask_nvidia_smi", lambda _: [GPU(0, "NVIDIA L4", "GPU-1")])
    assert nvidia_devices({}, tmp_path).names == ("NVIDIA L4",)
    monkeypatch.setattr(nvidia, "ask_nvidia_smi", lambda _: [])
    none = nvidia_devices({}, tmp_path)
    assert none.count == 0
    assert "nvidia-smi lists none" in none.evidence


def test_nvidia_smi_is_not_asked_when_the_kernel_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(_: object) -> list[GPU]:
        raise AssertionError("asked")

    monkeypatch.setattr(nvidia, "ask_nvidia_smi", smi)
    assert nvidia_devices({}, machine(tmp_path, ["L4"])).count == 1
    (tmp_path / "empty").mkdir()
    assert nvidia_devices({}, tmp_path / "empty").evidence == "no /dev/nvidia*"


def test_the_output_of_nvidia_smi_is_read_and_a_failing_one_is_no_gpu(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, GPU-ab'\necho 'NVIDIA H200, GPU-cd'\n")
    tool.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert ask_nvidia_smi(environ) == [GPU(0, "NVIDIA H200", "GPU-ab"), GPU(1, "NVIDIA H200", "GPU-cd")]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, sorry'\nexit 9\n")
    assert ask_nvidia_smi(environ) == []
    assert ask_nvidia_smi({"PATH": str(tmp_path / "nowhere")}) == []


def test_a_torch_without_cuda_has_no_gpus(tmp_path: Path) -> None:
    """`auto` must not choose what the installed torch cannot use."""
    machine(tmp_path, ["H100"])
    found = find_devices({}, tmp_path, torch="2.13.0+cpu")
    assert found.count == 0
    assert "built without CUDA" in found.evidence
    assert find_devices({}, tmp_path, torch="2.13.0").count == 1


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_rocm_gpus_are_found(tmp_path: Path, environ: dict[str, str], count: int) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    for number, (simd, minor) in enumerate([(0, 0), (1216, 128), (1216, 129), (1216, 130)]):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"simd_count {simd}\ndrm_render_minor {minor}\ngfx_target_version 90402\nunique_id {number}\n"
        )
    for minor in (128, 129):  # the third was not given to this container
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    found = find_devices(environ, tmp_path, torch=None)
    assert found.count == count
    assert found.names == ("AMD gfx942",) * count


@pytest.mark.parametrize(
    ("files", "environ", "installed", "count"),
    [
        (["accel0", "accel1", "accel2", "accel3"], {"TPU_WORKER_ID": "0"}, False, 4),
        (["accel0", "accel1"], {"TPU_ACCELERATOR_TYPE": "v3-8"}, False, 4),
        (["vfio/0", "vfio/1", "vfio/vfio"], {"TPU_SKIP_MDS_QUERY": "1"}, True, 2),
        (["vfio/0", "vfio/vfio"], {}, True, 0),
        (["accel0"], {}, True, 0),
        (["accel0", "accel1"], {"PJRT_DEVICE": "TPU", "TPU_VISIBLE_CHIPS": "1"}, True, 1),
        ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, True, 4),
        ([], {"PJRT_DEVICE": "CPU"}, False, 0),
    ],
)
def test_xla_devices_are_found(
    tmp_path: Path, files: list[str], environ: dict[str, str], installed: bool, count: int
) -> None:
    for name in files:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert find_xla(environ, tmp_path, installed=installed).count == count


@pytest.mark.parametrize(("pci_class", "count"), [("0xff0000", 1), ("0x020000", 0), ("0x010802", 0)])
def test_a_google_disk_or_network_card_is_no_tpu(tmp_path: Path, pci_class: str, count: int) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1ae0\n")
    (device / "class").write_text(pci_class + "\n")
    assert find_xla({}, tmp_path, installed=False).count == count


def test_mps_is_on_apple_processors_only() -> None:
    assert [find_mps(*m).count for m in [("darwin", "arm64"), ("darwin", "x86_64"), ("linux", "aarch64")]] == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "tag", "backend"),
    [
        ("cpu", "cpu", "gloo"),
        ("cuda", "cuda", "nccl"),
        ("gpu", "cuda", "nccl"),
        ("mps", "mps", "gloo"),
        ("xla", "xla", "xla"),
        ("tpu", "xla", "xla"),
    ],
)
def test_both_names_of_an_accelerator_give_its_config(name: str, tag: str, backend: str) -> None:
    plugins = PluginManager()
    config = parse_backend("accelerator", name, plugins)
    assert config.name == tag
    assert plugins.label(config) == tag
    assert cast("Any", plugins.get("accelerator", name)).backend == backend


def test_the_best_accelerator_has_the_highest_priority() -> None:
    plugins = PluginManager()
    order = sorted(("cpu", "xla", "cuda", "mps"), key=lambda n: -cast("Any", plugins.get("accelerator", n)).priority)
    assert order == ["cuda", "xla", "mps", "cpu"]


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_the_cpu_accelerator_is_of_the_engine_s_family(engine: Any) -> None:
    from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
    from lightning.pytorch.accelerators import CPUAccelerator

    from fairlead_lightning.accelerators import build
    from fairlead_lightning.accelerators.cpu import CPUAcceleratorConfig

    context = BuildContext(cast("Any", None), {}, PluginManager([]), engine=engine)
    assert type(build(CPUAcceleratorConfig(), context)) is (CPUAccelerator if engine == "trainer" else FabricCPU)


def test_a_gpu_that_torch_cannot_use_is_said_with_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import CUDAAccelerator

    from fairlead.errors import ConfigError
    from fairlead_lightning.accelerators.cuda import CUDAAcceleratorConfig, build

    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    resolution = SimpleNamespace(devices_found=SimpleNamespace(evidence="/dev/nvidia*"))
    with pytest.raises(ConfigError, match="finds no GPU it can use") as caught:
        build(CUDAAcceleratorConfig(), BuildContext(cast("Any", resolution), {}, PluginManager([])))
    assert "/dev/nvidia*" in (caught.value.why or "")


def test_looking_for_devices_imports_nothing_heavy() -> None:
    code = """
import sys
from fairlead.plugins import PluginManager
plugins = PluginManager()
for name in ("cpu", "cuda", "mps", "xla"):
    assert plugins.call(plugins.get("accelerator", name), "fairlead_devices", environ={})
for name in ("csv", "tensorboard", "wandb"):
    plugins.get("logger", name)
print([m for m in ("torch", "lightning", "numpy", "wandb", "torch_xla", "rich") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "trainer", "expected", "names"),
    [
        ("cpu", {"deterministic": "warn", "benchmark": True}, "exact", ""),
        ("cuda", {}, "not exact", "trainer.deterministic: null"),
        ("cuda", {"deterministic": False}, "not exact", "trainer.deterministic: false"),
        ("cuda", {"deterministic": "warn"}, "not exact", "trainer.deterministic: warn"),
        ("gpu", {"deterministic": True, "benchmark": True}, "not exact", "trainer.benchmark"),
        ("cuda", {"deterministic": True}, "exact", ""),
        ("mps", {"deterministic": True}, "not known", "'mps'"),
        ("xla", {"deterministic": True}, "not known", "'xla'"),
    ],
)
def test_what_accelerators_say_of_an_exact_resume(
    name: str, trainer: dict[str, Any], expected: Verdict, names: str
) -> None:
    """A GPU whose kernels are not deterministic is never called exact; nor what nobody has tried."""
    plugins = PluginManager()
    resolution = minimal_resolution(plugins, accelerator=name, strategy="single_device", devices=1, **trainer)
    reasons = device_reasons(resolution, plugins)
    assert verdict(reasons) == expected, reasons
    assert all(names in reason.what and reason.why and reason.fix for reason in reasons)


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [
        ("v4-8", "xla"),
        ("v5litepod-16", "xla"),
        ("v6e", "xla"),
        ("v5p-128", "xla"),
        ("tpu", "tpu"),
        ("v100", "cuda"),
        ("h100", "cuda"),
        ("mi300x", "cuda"),
        ("max 1550", "xpu"),
        ("pvc", "xpu"),
    ],
)
def test_the_kind_of_device_is_known_by_its_name(device: str, accelerator: str) -> None:
    profile = ResourcesConfig(device=device)
    found, _ = check_trainer(TrainerConfig(), environ={}, plugins=PluginManager(), profile=profile)
    assert found.value("accelerator") == accelerator


def intel(root: Path, addresses: dict[str, tuple[str, str]]) -> Path:
    """A machine with graphics devices: vendor and driver by PCI address."""
    for number, (address, (vendor, driver)) in enumerate(addresses.items()):
        device = root / f"sys/devices/pci0000:00/{address}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        folder = root / f"sys/bus/pci/drivers/{driver}"
        folder.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(folder)
        card = root / f"sys/class/drm/renderD{128 + number}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
    return root


@pytest.mark.parametrize(
    ("environ", "torch", "count"),
    [
        ({}, "2.13.0+xpu", 2),
        ({}, None, 2),
        ({"ZE_AFFINITY_MASK": "1"}, "2.13.0+xpu", 1),
        ({"ZE_AFFINITY_MASK": "0.0,0.1"}, "2.13.0+xpu", 1),
        ({"ZE_AFFINITY_MASK": "7"}, "2.13.0+xpu", 0),
        ({}, "2.13.0+cpu", 0),
    ],
)
def test_intels_gpus_are_found_without_torch(
    environ: dict[str, str], torch: str | None, count: int, tmp_path: Path
) -> None:
    """A processor's own graphics, and another vendor's, are none."""
    root = intel(
        tmp_path,
        {
            "0000:00:02.0": ("0x8086", "i915"),
            "0000:29:00.0": ("0x8086", "xe"),
            "0000:3a:00.0": ("0x8086", "i915"),
            "0000:4b:00.0": ("0x10de", "nvidia"),
        },
    )
    found = find_xpu(environ, root, torch=torch)
    assert found.count == count
    assert "/sys/class/drm" in found.evidence
    assert find_xpu({}, tmp_path / "none", torch=None).count == 0


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_intels_accelerator_with_a_stand_in_for_the_device(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes it, and asks it which devices there are. No GPU of Intel was ever here."""
    import lightning.pytorch as pl
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingle
    from lightning.pytorch.strategies import SingleDeviceStrategy

    plugins = PluginManager()
    config: Any = parse_backend("accelerator", "xpu", plugins)
    context = BuildContext(minimal_resolution(plugins, accelerator="xpu"), {}, plugins, engine)
    from fairlead_lightning.accelerators.xpu_runtime import build

    with pytest.raises(ConfigError, match="finds no GPU of Intel"):
        build(config, context)
    chosen: list[Any] = []
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "set_device", chosen.append)
    made = build(config, context)
    assert made.parse_devices(2) == [0, 1] == made.parse_devices(-1)
    assert made.get_parallel_devices([1]) == [torch.device("xpu", 1)]
    assert made.auto_device_count() == 2
    with pytest.raises(ConfigError, match=r"\[5\] were requested, but torch finds 2"):
        made.parse_devices([0, 5])
    made.setup_device(torch.device("xpu", 1))
    assert chosen == [torch.device("xpu", 1)]
    with pytest.raises(ConfigError, match="was given the device cpu"):
        made.setup_device(torch.device("cpu"))
    if engine == "trainer":
        strategy = SingleDeviceStrategy(torch.device("xpu", 1))
        trainer = pl.Trainer(accelerator=made, devices=[1], strategy=strategy, logger=False)
        assert trainer.accelerator is made
        assert trainer.strategy.root_device == torch.device("xpu", 1)
    else:
        assert Fabric(accelerator=made, devices=[1], strategy=FabricSingle("xpu:1")).device == torch.device("xpu", 1)


def test_what_nobody_ran_on_intels_gpus_is_said() -> None:
    rows = [row for row in capability_table(PluginManager())[0] if row.subject == "accelerator.xpu"]
    said = {other: row.support for row in rows for other in row.others}
    assert said["strategy.ddp"] == "no"
    assert said["strategy.fsdp2"] == "partial"
    assert "strategy.single_device" not in said
