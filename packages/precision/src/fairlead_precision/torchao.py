"""8-bit floating point in linear layers by torchao, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from fairlead import Capability, Finding, PrecisionConfigBase, Resolution, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.hardware import without_fp8
from fairlead_precision.modes import UnprovenPrecision


class TorchAOFloat8PrecisionConfig(PrecisionConfigBase):
    """8-bit floating point in linear layers, by torchao; weights and the rest of the model keep their precision.

    Example:
        >>> TorchAOFloat8PrecisionConfig(recipe="rowwise", ignore_modules=("model.lm_head",)).compute
        'bf16-mixed'
    """

    name: Literal["fp8-torchao"] = "fp8-torchao"
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled, torchao's names: by one factor a tensor (fastest), one a row (more exact), or one a row
    with the weights' gradients in the wider precision (most exact)."""
    compute: Literal["bf16-mixed", "bf16-true", "32-true"] = "bf16-mixed"
    """The precision of everything else, under Lightning's name. `rowwise` on a GPU needs a bf16 one."""
    ignore_modules: tuple[str, ...] = Field((), strict=False)
    """Submodules whose layers stay as they are, such as `model.lm_head`, by their names in the trained module."""
    skip_first_and_last: bool = True
    """Leave the first and the last Linear of the model as they are: their errors cost most."""
    pad_inner_dim: bool = False
    """Pad with zeros what is multiplied, where the rows of a batch (samples x tokens) are no multiple of 16. Takes
    memory."""
    emulate: bool = False
    """Round to 8 bits but multiply in 32, on GPUs without 8-bit units; on a CPU always. It is slower than 32 bits, and
    shows what the rounding does to a training."""


class TorchAOFloat8(UnprovenPrecision):
    """8-bit floating point by torchao."""

    config = TorchAOFloat8PrecisionConfig
    runtime = "fairlead_precision.torchao_runtime:build"
    engines = (*LIGHTNING, "torchao")
    extra = "torchao"
    unproven = Inexact(
        "precision: fp8-torchao",
        why="no test has resumed it on a GPU; on a CPU a resumed run ends with the same bits",
        fix="precision: bf16-mixed",
        certain=False,
    )
    codes: ClassVar[Mapping[str, str]] = {"precision-fp8-units": "The device has no 8-bit units, and would emulate."}

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices that it does not drive, and the one that emulates it."""
        yield Capability(
            "precision.fp8-torchao",
            ("accelerator.mps", "accelerator.xla"),
            "no",
            "torchao's 8-bit training has no kernels for it",
            "precision: bf16-mixed, or bf16-true with xla",
        )
        yield Capability(
            "precision.fp8-torchao",
            ("accelerator.cpu",),
            "partial",
            "a CPU has no 8-bit units: values are rounded to 8 bits and multiplied in 32, slower than without",
            "precision: bf16-mixed, unless it is to try a job out",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Refuses GPUs that are known to have no 8-bit units, and says what to take."""
        config = resolution.precision
        assert isinstance(config, TorchAOFloat8PrecisionConfig)
        old = without_fp8(resolution.devices_found.names)
        if old and not config.emulate:
            yield Finding(
                "error",
                "precision-fp8-units",
                f"{old.names} cannot compute in 8-bit floating point",
                where="trainer.precision",
                why=old.why,
                fix=f"precision: {old.instead}; or emulate: true, which is slow",
            )


float8 = TorchAOFloat8()
