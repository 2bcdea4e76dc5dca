"""The public conformance suite, over this plugin."""

from fairlead.testing import EnvironmentConformance


class TestPBS(EnvironmentConformance):
    plugin_name = "pbs"
