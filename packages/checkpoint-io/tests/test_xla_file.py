"""`checkpoint_io: xla` without torch_xla; `integration_tests/xla` writes from XLA devices and reads again."""

from __future__ import annotations

import pytest

from fairlead.errors import MissingDependencyError
from fairlead.install import install_line
from fairlead.plugins import PluginManager


@pytest.mark.skipif(PluginManager().is_installed("torch-xla"), reason="torch_xla is installed")
def test_without_torch_xla_the_pip_line_is_named() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        PluginManager().require_engines("checkpoint_io", "xla")
    assert caught.value.fix == install_line("xla")
