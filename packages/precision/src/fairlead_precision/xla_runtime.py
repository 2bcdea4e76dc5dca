"""Lightning's XLA precision where it sets XLA_USE_BF16 and XLA_USE_F16, which torch-xla reads no more.

Without them `bf16-true` would train in 32 bits, silently.  Here the model's own tensors are of the format, as they are
in Lightning's `HalfPrecision` on other devices.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision import XLAPrecision as FabricXLAPrecision
from lightning.pytorch.plugins.precision import HalfPrecision, XLAPrecision

from fairlead import BuildContext
from fairlead_precision.xla import XLAPrecisionConfig


def build(config: XLAPrecisionConfig, context: BuildContext) -> Any:
    """The precision for the mode, of the engine's class family."""
    mode = config.precision
    if context.engine == "trainer":
        return XLAPrecision("32-true") if mode == "32-true" else HalfXLAPrecision(mode)
    return FabricXLAPrecision("32-true") if mode == "32-true" else FabricHalfXLAPrecision(mode)


class HalfXLAPrecision(HalfPrecision, XLAPrecision):
    """16-bit tensors, and the optimizer's step through torch-xla."""

    def __init__(self, mode: Any) -> None:
        HalfPrecision.__init__(self, mode)
        self._desired_dtype = self._desired_input_dtype

    def teardown(self) -> None:
        """Nothing was exported."""


class FabricHalfXLAPrecision(FabricHalfPrecision, FabricXLAPrecision):
    """The same for Fabric."""

    def __init__(self, mode: Any) -> None:
        FabricHalfPrecision.__init__(self, mode)
        self._desired_dtype = self._desired_input_dtype

    def teardown(self) -> None:
        """Nothing was exported."""
