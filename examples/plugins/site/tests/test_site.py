"""The public conformance suites over these plugins."""

from fairlead.testing import CheckConformance, CommandConformance, LoggerConformance, RequeueConformance


class TestJSONL(LoggerConformance):
    plugin_name = "jsonl"


class TestSpool(RequeueConformance):
    plugin_name = "spool"


class TestDisk(CommandConformance):
    plugin_name = "disk"


class TestScratch(CheckConformance):
    plugin_name = "scratch"
