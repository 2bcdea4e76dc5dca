"""The public conformance suite, over this plugin."""

from pathlib import Path

from fairlead.testing import EnvironmentConformance


class TestPBS(EnvironmentConformance):
    plugin_name = "pbs"
    # Of two nodes with two ranks each, this is the first rank of the second.
    example_environ = {  # noqa: RUF012
        "PBS_JOBID": "17.server",
        "PBS_NODEFILE": str(Path(__file__).with_name("nodefile")),
        "PBS_VNODENUM": "2",
    }
