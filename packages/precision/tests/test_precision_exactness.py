"""What the precisions say of an exact resume."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead.exactness import Verdict, device_reasons, verdict
from fairlead.plugins import PluginManager
from fairlead.testing import minimal_resolution


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "exact") for name in ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")),
        *((name, "not known") for name in ("transformer-engine", "bitsandbytes", "fp8-torchao", "deepspeed")),
        ("fsdp", "exact"),
        ("xla", "exact"),
        ({"name": "xla", "precision": "16-true"}, "not known"),
    ],
)
def test_what_precisions_say(name: Any, expected: Verdict) -> None:
    """A checkpoint holds numbers of any format as they are; the state of engines was never shown to be whole."""
    plugins = PluginManager()
    resolution = minimal_resolution(plugins, precision=name, accelerator="cpu")
    reasons = [one for one in device_reasons(resolution, plugins) if "precision" in one.what]
    assert verdict(reasons) == expected
