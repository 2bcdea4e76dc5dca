"""The public conformance suite, over this plugin."""

from fairlead.testing import CheckpointIOConformance


class TestNpy(CheckpointIOConformance):
    plugin_name = "npy"
