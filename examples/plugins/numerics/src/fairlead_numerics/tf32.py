"""32-bit numbers whose matrix products may be rounded to TensorFloat-32: much faster on GPUs since Ampere."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, PrecisionConfigBase, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact


class TF32PrecisionConfig(PrecisionConfigBase):
    """32-bit numbers; matrix products may take TensorFloat-32 (10 bits of mantissa) while the run lasts."""

    name: Literal["tf32"] = "tf32"
    """The tag."""
    matmul: Literal["high", "medium"] = "high"
    """As `torch.set_float32_matmul_precision`: `high` is TensorFloat-32, `medium` is bfloat16."""


class TF32(PrecisionPlugin):
    """TensorFloat-32 for one run, not for the process for ever."""

    config = TF32PrecisionConfig
    runtime = "fairlead_numerics.tf32:build"
    engines = ("torch", "lightning")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The rounding is the same in each start."""
        return ()


def build(config: TF32PrecisionConfig, context: BuildContext) -> Any:
    """Lightning's 32-bit precision of the engine's family, with the setting around it."""
    torch = importlib.import_module("torch")
    family = "pytorch" if context.engine == "trainer" else "fabric"
    base: Any = importlib.import_module(f"lightning.{family}.plugins.precision").Precision
    before = torch.get_float32_matmul_precision()

    def convert_module(self: Any, module: Any) -> Any:
        torch.set_float32_matmul_precision(config.matmul)
        return base.convert_module(self, module)

    def teardown(self: Any) -> None:
        torch.set_float32_matmul_precision(before)
        base.teardown(self)

    return type("TF32Precision", (base,), {"convert_module": convert_module, "teardown": teardown})()


tf32 = TF32()
