"""The public conformance suite, over this plugin."""

from fairlead.testing import StrategyConformance


class TestLocalSGD(StrategyConformance):
    plugin_name = "localsgd"
