"""The public conformance suite, over this plugin."""

from pathlib import Path

import pytest

from fairlead.testing import EnvironmentConformance


class TestPBS(EnvironmentConformance):
    plugin_name = "pbs"

    @pytest.fixture
    def example_environ(self, tmp_path: Path) -> dict[str, str]:
        nodefile = tmp_path / "nodes"
        nodefile.write_text("a\na\nb\nb\n")
        return {"PBS_NODEFILE": str(nodefile), "PBS_VNODENUM": "2"}
