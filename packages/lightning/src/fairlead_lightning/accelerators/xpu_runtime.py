"""Intel's GPUs for Lightning, over `torch.xpu`. No such GPU was there: tests put a stand-in for `torch.xpu`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator as FabricAccelerator
from lightning.pytorch.accelerators import Accelerator

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.xpu import XPUAcceleratorConfig


class _XPU:
    """What both of Lightning's families ask of an accelerator."""

    def setup_device(self, device: torch.device) -> None:
        """The device is this rank's."""
        if device.type != "xpu":
            raise ConfigError(f"the accelerator xpu was given the device {device}", where="trainer.accelerator")
        torch.xpu.set_device(device)

    def teardown(self) -> None:
        """What is cached is given back."""
        torch.xpu.empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The indices of a number of devices, or those that are listed.

        Raises:
            ConfigError: One of them is not there.
        """
        requested = list(range(int(devices))) if isinstance(devices, int | str) else list(devices)
        count = torch.xpu.device_count()
        if devices in (-1, "-1"):
            requested = list(range(count))
        wrong = [index for index in requested if not 0 <= index < count]
        if wrong or not requested:
            raise ConfigError(
                f"the devices {wrong or requested} were requested, but torch finds {count} GPUs of Intel",
                where="trainer.devices",
                fix=f"devices: {count}" if count else "accelerator: cpu",
            )
        return requested

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """One device for each rank of this node."""
        return [torch.device("xpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many there are."""
        return int(torch.xpu.device_count())

    @staticmethod
    def is_available() -> bool:
        """Whether torch can use one."""
        return bool(torch.xpu.is_available())

    @staticmethod
    def name() -> str:
        """The name in Lightning's registry."""
        return "xpu"


class XPUAccelerator(_XPU, Accelerator):
    """For the Trainer."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """What torch knows of the device's memory, in bytes."""
        return dict(torch.xpu.memory_stats(device))


class FabricXPUAccelerator(_XPU, FabricAccelerator):
    """For Fabric."""


def build(config: XPUAcceleratorConfig, context: BuildContext) -> Any:
    """The accelerator, or a `ConfigError` where the machine may have GPUs that this torch cannot use."""
    if not _XPU.is_available():
        raise ConfigError(
            f"torch {torch.__version__} finds no GPU of Intel that it can use",
            where="trainer.accelerator",
            why=f"seen without torch: {context.resolution.devices_found.evidence}",
            fix="install a torch built for XPU (pytorch.org/get-started), or choose `accelerator: cpu`",
        )
    return XPUAccelerator() if context.engine == "trainer" else FabricXPUAccelerator()
