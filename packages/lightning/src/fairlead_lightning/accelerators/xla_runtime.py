"""Lightning's XLA accelerator where it asks for TPU chips only: PJRT drives CPUs and GPUs, too."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import XLAAccelerator as FabricXLAAccelerator
from lightning.pytorch.accelerators import XLAAccelerator

from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.xla import XLAAcceleratorConfig


def build(config: XLAAcceleratorConfig, context: BuildContext) -> FabricXLAAccelerator:
    """The accelerator of one process; over several hosts Lightning's own, for whose strategy a rank is a chip."""
    if context.resolution.world_size > 1:
        return XLAAccelerator() if context.engine == "trainer" else FabricXLAAccelerator()
    return PJRTAccelerator() if context.engine == "trainer" else FabricPJRTAccelerator()


class FabricPJRTAccelerator(FabricXLAAccelerator):
    """Any device that PJRT drives; that it is there was resolved before."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int | list[int]:
        """The number or the indices that were resolved: Lightning's own compares them with the number of TPU chips."""
        return devices if isinstance(devices, list) else int(devices)

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """Names of the devices; the strategy takes the real ones."""
        return [torch.device("xla", index) for index in (devices if isinstance(devices, list) else range(devices))]

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]  # Lightning's is cached
        """Devices that this process drives, of any kind."""
        from torch_xla import runtime

        return int(runtime.addressable_runtime_device_count())

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]  # as above
        """Whether PJRT has a device of any kind; Lightning's own asks for TPU chips."""
        from torch_xla import runtime

        return runtime.device_type() is not None

    @staticmethod
    def name() -> str:
        """The name for Lightning; `tpu` is taken."""
        return "xla"


class PJRTAccelerator(FabricPJRTAccelerator, XLAAccelerator):
    """The same for the Trainer."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Memory of the device in MB, under Lightning's names; nothing where PJRT does not report it, as on a CPU.

        Lightning's own reads names that torch-xla has given up.
        """
        from torch_xla.core import xla_model

        try:
            info = xla_model.get_memory_info(str(device))
        except RuntimeError:
            return {}
        used, limit = info.get("bytes_used", 0), info.get("bytes_limit", 0)
        peak = info.get("peak_bytes_used", used)
        return {"avg. free memory (MB)": (limit - used) / 1e6, "avg. peak memory (MB)": peak / 1e6}
