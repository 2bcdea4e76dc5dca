"""What `half`, `16-true` and `bf16-true` contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fairlead import Capability, Finding, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.checks import emulated_bfloat16
from fairlead_precision.fields import LIGHTNING
from fairlead_precision.half.config import HalfPrecisionConfig

__all__ = ["HalfPrecision", "half", "half_bfloat16", "half_float16"]


class HalfPrecision(PrecisionPlugin):
    """16-bit numbers throughout."""

    config = HalfPrecisionConfig
    runtime = "fairlead_precision.half.runtime:build"
    aliases = ("HalfPrecisionPluginConfig",)
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Where it runs and loses the numbers."""
        yield Capability(
            "precision.16-true",
            ("accelerator.cpu",),
            "partial",
            "float16 parameters without loss scaling under- and overflow: Adam's default eps of 1e-8 is 0 in float16, "
            "and the first parameter with a zero gradient becomes NaN",
            "precision: bf16-true, or an optimizer with eps=1e-4",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Old GPUs emulate bfloat16."""
        config = resolution.precision
        assert isinstance(config, HalfPrecisionConfig)
        if config.dtype == "bfloat16":
            yield from emulated_bfloat16(resolution, "trainer.precision", "precision: 16-mixed")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A checkpoint holds 16-bit numbers as they are."""
        return ()


half = HalfPrecision()
half_float16 = HalfPrecision(dtype="float16")
half_bfloat16 = HalfPrecision(dtype="bfloat16")
