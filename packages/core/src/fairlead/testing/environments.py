"""The conformance suite of environments."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.interfaces import Claim, Job, Setting, Specificity, StopReason, Topology, Unused
from fairlead.plugin_classes import EnvironmentPlugin
from fairlead.testing.conformance import PluginConformance, skip


class EnvironmentConformance(PluginConformance):
    """For plugins of the axis `environment`.

    `example_environ`, here or in the plugin, has the variables of one rank, or of a job.
    """

    axis = "environment"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.fabric.plugins.environments:ClusterEnvironment"}

    def detect(self, variables: Mapping[str, str]) -> Claim | None:
        """What the plugin claims of these variables."""
        process = dict(os.environ)
        results: list[Claim] = self.answers("fairlead_detect", Claim, variables)
        assert dict(os.environ) == process, self.broken(
            "fairlead_detect changed os.environ", "read `environ` only, and write nothing"
        )
        for claim in results:
            assert claim.evidence.strip(), self.broken("a claim has no evidence", "name the variables that show it")
        return results[0] if results else None

    def test_claims_nothing_without_evidence(self) -> None:
        """No variables, no claim, except that this may be any machine."""
        claim = self.detect({})
        assert claim is None or claim.specificity == Specificity.MACHINE, self.broken(
            f"it claims any process: {claim}", "return None unless variables of its launcher are set"
        )

    def test_has_an_example(self) -> None:
        """Without the variables of a rank or a job nothing of it can be tried."""
        plugin = self.plugin()
        given = plugin.example_environ if self.example_environ is None else self.example_environ
        assert given is not None, self.broken(
            "there is no example_environ",
            "set it here or in the plugin to the variables of one rank, or a job",
        )

    def test_claims_its_own(self) -> None:
        """The variables of its example are claimed; one that starts no ranks knows the job in them."""
        plugins = self.plugins()
        if not self.implements(plugins, "fairlead_detect"):
            assert self.answers("fairlead_job", Job), self.broken(
                "it claims no rank and finds no job", "implement fairlead_detect or fairlead_job"
            )
            return
        assert self.detect(self.environ(plugins)), self.broken(
            "it does not claim its own example_environ", "return a Claim there, or correct the example"
        )

    def test_topology_is_consistent(self) -> None:
        """Every rank lies within its world, and every value has its reason."""
        config = self.config()
        assert isinstance(config, EnvironmentConfigBase)
        for topology in self.answers("fairlead_topology", Topology, config=config):
            self._check(topology)

    def test_its_job_is_usable(self) -> None:
        """No variables, no job; the example's has an id with its scheduler, and numbers with their reasons."""
        assert self.answers("fairlead_job", Job, {}) == [], self.broken(
            "fairlead_job finds a job without variables", "return None there"
        )
        for job in self.answers("fairlead_job", Job):
            assert all(job.id.partition(":")), self.broken(
                f"the job's id {job.id!r} is not `scheduler:id`", "write the scheduler before the id"
            )
            assert not isinstance(job.requeue, str), self.broken(
                "the job's `requeue` is a text", "give the command as a tuple of words; no shell splits it"
            )
            for cpus in (job.cpus_per_rank, job.cpus_on_node):
                assert cpus is None or (cpus.value > 0 and cpus.reason), self.broken(
                    f"{cpus!r} is no number of CPUs", "give a Setting with a number from 1 on, or None"
                )

    def test_says_why_without_its_scheduler(self, tmp_path: Path) -> None:
        """The hook `fairlead_why` answers by its deadline where the scheduler's commands are not there, or hang."""
        if not self.implements(self.plugins(), "fairlead_why"):
            skip(f"{self.key} does not say why a job is to stop")
        environ = {**self.environ(), "PATH": str(tmp_path)}
        began = time.monotonic()
        for answer in self.answers("fairlead_why", StopReason, environ, deadline=began + 2.0):
            assert answer.why == "unknown", self.broken(
                f"fairlead_why says {answer.why!r} without its scheduler's commands", "find them by environ['PATH']"
            )
        assert time.monotonic() - began < 10.0, self.broken(
            "fairlead_why took longer than its deadline", "ask with fairlead_runs.programs.ask"
        )

    def test_what_is_unused_is_reported(self) -> None:
        """The hook `fairlead_unused` gives the parts of a message; nothing where there are no variables."""
        assert self.answers("fairlead_unused", Unused, {}) == [], self.broken(
            "fairlead_unused finds something without variables", "return None there"
        )
        for unused in self.answers("fairlead_unused", Unused):
            assert all((unused.what, unused.why, unused.launcher)), self.broken(
                f"{unused!r} has an empty part", "fill all three: they are the message"
            )

    def test_names_its_requeuer(self) -> None:
        """`requeue` is the tag of a requeuer that exists."""
        plugins = self.plugins()
        plugin = self.plugin(plugins)
        assert isinstance(plugin, EnvironmentPlugin)
        known = {"none", *plugins.tags("requeue")}
        assert plugin.requeue in known, self.broken(
            f"`requeue` is {plugin.requeue!r}, and there is no such requeuer",
            f"set it to one of {', '.join(sorted(known))}; `command` runs what Job.requeue names",
        )

    def _check(self, topology: Topology) -> None:
        number: dict[str, int] = {}
        for name in Topology.__dataclass_fields__:
            setting = getattr(topology, name)
            if name in {"launched", "start"} or setting is None:
                continue
            assert isinstance(setting, Setting), self.broken(
                f"{name} is {setting!r}, not a Setting", "write Setting(value, reason)"
            )
            assert setting.reason.strip(), self.broken(f"{name} has no reason", "name the variable it comes from")
            if name != "main_address":
                assert isinstance(setting.value, int), self.broken(
                    f"{name} is {setting.value!r}, not a number", "convert it; Topology.from_variables does"
                )
                number[name] = setting.value
        for rank, size in (
            ("global_rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            if rank in number:
                limit = number.get(size, number[rank] + 1)
                assert 0 <= number[rank] < limit, self.broken(
                    f"{rank} is {number[rank]}, {size} is {limit}", "count ranks from 0, within their number"
                )
        if {"world_size", "local_world_size"} <= number.keys():
            assert number["local_world_size"] <= number["world_size"], self.broken(
                "there are more ranks on a node than in all", "correct local_world_size"
            )
