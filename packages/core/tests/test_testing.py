"""The tools for plugin authors: the suites pass a good plugin and catch each kind of bad one."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from fairlead import (
    Capability,
    Claim,
    Devices,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    Finding,
    Job,
    PluginManager,
    RequeueConfigBase,
    RequeuePlugin,
    Resolution,
    Setting,
    Specificity,
    StopReason,
    StrategyConfigBase,
    StrategyPlugin,
    Topology,
    Unused,
    hookimpl,
)
from fairlead.cli import commands, main
from fairlead.config_bases import AcceleratorConfigBase
from fairlead.plugin_classes import AXIS_PLUGINS, CommandPlugin
from fairlead.testing import (
    CONFORMANCE,
    AcceleratorConformance,
    CommandConformance,
    EnvironmentConformance,
    FakeDist,
    FakeEntryPoint,
    RequeueConformance,
    StrategyConformance,
    stand_ins,
)

pytest_plugins = ["pytester"]

GOOD = """
    from typing import Literal
    from fairlead import StrategyConfigBase, StrategyPlugin

    class RingStrategyConfig(StrategyConfigBase):
        '''A ring.'''
        name: Literal["ring"] = "ring"
        bucket_cap_mb: int = 25
        '''Mebibytes.'''

    class Ring(StrategyPlugin):
        config = RingStrategyConfig
        runtime = "ring_strategy.runtime:build"

    ring = Ring()
    ring_small = Ring(bucket_cap_mb=1)
"""
RUNTIME = """
    class Strategy: ...

    def build(config, context):
        assert context.resolution.strategy == config
        return Strategy()
"""
POINTS = {"strategy.ring": "ring_strategy.plugin:ring", "strategy.ring_small": "ring_strategy.plugin:ring_small"}


def names_of(suite: type) -> list[str]:
    """The names of a suite's tests."""
    return sorted(name for name in dir(suite) if name.startswith("test_"))


def outcome(suite: Any, test: str, tmp_path: Path) -> str:
    """`passed`, the reason of a skip, or the message of the failure."""
    method = getattr(suite(), test)
    try:
        method(tmp_path) if "tmp_path" in method.__code__.co_varnames[: method.__code__.co_argcount] else method()
    except AssertionError as error:
        return str(error)
    except unittest.SkipTest as error:
        return f"skipped: {error}"
    return "passed"


def suite_for(base: type, target: Any, **settings: Any) -> type:
    """A suite over one local plugin and the stand-ins."""
    name = settings.pop("name", None) or (target.name if isinstance(target, CommandPlugin) else target.tag)
    key = f"{base.axis}.{name}"  # type: ignore[attr-defined]  # a suite
    points = [FakeEntryPoint(k, t) for k, t in {**stand_ins(), key: target}.items()]
    return type("Suite", (base,), {"plugin_name": name, "entry_points": points, **settings})


def test_every_axis_has_a_suite() -> None:
    assert CONFORMANCE.keys() == AXIS_PLUGINS.keys()
    assert all(suite.axis == axis for axis, suite in CONFORMANCE.items())


def test_a_suite_runs_under_pytest_as_an_author_writes_it(pytester: pytest.Pytester) -> None:
    """Three lines in the author's project, over a really importable distribution."""
    pytester.makepyfile(
        f"""
        import pytest
        from fairlead.testing import StrategyConformance, stand_ins, FakeEntryPoint, write_dist

        class TestRing(StrategyConformance):
            plugin_name = "ring"
            builds = {{"trainer": "ring_strategy.runtime:Strategy"}}

            @pytest.fixture(autouse=True)
            def installed(self, fake_dist):
                dist = fake_dist("ring-strategy", entry_points={POINTS!r}, files={{
                    "ring_strategy/plugin.py": {GOOD!r}, "ring_strategy/runtime.py": {RUNTIME!r}}})
                others = [FakeEntryPoint(name, target) for name, target in stand_ins().items()]
                type(self).entry_points = [*dist.entry_points, *others]

        class TestRingSmall(TestRing):
            plugin_name = "ring_small"
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2 * len(names_of(StrategyConformance)))


class RingStrategyConfig(StrategyConfigBase):
    """A ring."""

    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25
    """Mebibytes."""


class Ring(StrategyPlugin):
    """A ring."""

    config: ClassVar[type[StrategyConfigBase]] = RingStrategyConfig
    runtime = "json:loads"


class ThawedStrategyConfig(RingStrategyConfig, frozen=False, extra="allow"):
    """Not frozen, and any field goes."""


class BareStrategyConfig(StrategyConfigBase):
    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25


class Ring2(StrategyConfigBase):
    """Named against the rule."""

    name: Literal["ring"] = "ring"


class LossyStrategyConfig(RingStrategyConfig):
    """Does not come back from JSON."""

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """Forgets a field."""
        return {"name": self.name}


class RequiredStrategyConfig(RingStrategyConfig):
    """Has a field that must be given."""

    path: str
    """A path."""


def ring(**attributes: Any) -> Ring:
    """A ring with something changed."""
    made = type("Ring", (Ring,), attributes)()
    assert isinstance(made, Ring)
    return made


class Talker(Ring):
    """Says wrong things in every hook."""

    codes: ClassVar[Mapping[str, str]] = {"Ring_Code": "x"}

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """No reason."""
        return [Capability("strategy.ring", ("accelerator.cpu",), "partial", " ")]

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """An unknown code."""
        yield Finding("info", "never-explained", "x")


def rows(subject: str, other: str) -> Ring:
    """A ring with one row in the capability table."""

    def fairlead_capabilities(self: Any) -> Iterable[Capability]:
        return [Capability(subject, (other,), "no", "they do not meet")]

    return ring(fairlead_capabilities=hookimpl(fairlead_capabilities))


@pytest.mark.parametrize(
    ("plugin", "settings", "test", "said"),
    [
        (ImportError("no ring"), {"name": "ring"}, "test_is_found_and_loads", "ImportError: no ring"),
        (ring(), {"name": "rang"}, "test_is_found_and_loads", "the entry point says 'rang'"),
        (ring(config=RequiredStrategyConfig), {"example": {"path": "x"}}, "test_config_constructs", "passed"),
        (ring(config=ThawedStrategyConfig), {}, "test_config_is_frozen", "frozen=True"),
        (ring(config=ThawedStrategyConfig), {}, "test_config_forbids_unknown_fields", "extra='forbid'"),
        (ring(config=BareStrategyConfig), {}, "test_every_field_is_documented", "BareStrategyConfig has no docstring"),
        (ring(config=Ring2), {}, "test_config_is_named_by_its_axis", "should be called <Name>StrategyConfig"),
        (Ring2, {"name": "ring"}, "test_is_found_and_loads", "needs an instance of fairlead.StrategyPlugin"),
        (ring(config=LossyStrategyConfig), {"example": {"bucket_cap_mb": 3}}, "test_config_round_trips", "gives back"),
        (ring(runtime=None), {}, "test_runtime_is_importable", "`runtime` is not set"),
        (ring(runtime="json:no_such"), {}, "test_runtime_is_importable", "not callable"),
        (ring(runtime="json.no_such:build"), {}, "test_is_found_and_loads", "there is no module 'json.no_such'"),
        (ring(runtime="no_such_module:build"), {}, "test_is_found_and_loads", "there is no module 'no_such_module'"),
        (ring(runtime="gone:build", engines=("gone",)), {}, "test_is_found_and_loads", "passed"),  # as an engine is
        (ring(engine=("torch",)), {}, "test_is_found_and_loads", "did you mean `engines`?"),
        (ring(engines="torch"), {}, "test_is_found_and_loads", "`engines` is a text"),
        (ring(aliases="Ring"), {}, "test_is_found_and_loads", "write `aliases = ('Ring',)`"),
        (rows("strategy.ring", "acelerator.cpu"), {}, "test_is_found_and_loads", "did you mean accelerator.cpu?"),
        (rows("strategy.ring", "precision.32-tru"), {}, "test_is_found_and_loads", "did you mean precision.32-true?"),
        (rows("strategy.ring", "strategy.of_another"), {}, "test_is_found_and_loads", "passed"),
        (
            ring(engines=("no-such-engine",)),
            {},
            "test_runtime_is_importable",
            "skipped: strategy.ring: the engine is not",
        ),
        (Talker(), {}, "test_codes_are_explained", "not in kebab-case"),
        (ring(codes={"ring-code": " "}), {}, "test_codes_are_explained", "has no explanation"),
        (ring(codes={"capability": "mine"}), {}, "test_codes_are_explained", "one of fairlead's own"),
        (Talker(), {}, "test_capabilities_are_rows", "has no reason"),
        (Talker(), {}, "test_checks_give_findings", "'never-explained' is not in"),
    ],
)
def test_a_bad_strategy_is_caught(plugin: Any, settings: dict[str, Any], test: str, said: str, tmp_path: Path) -> None:
    assert said in outcome(suite_for(StrategyConformance, plugin, **settings), test, tmp_path)


def test_a_runtime_that_builds_something_else_is_caught(tmp_path: Path, fake_dist: Callable[..., FakeDist]) -> None:
    wrong = RUNTIME.replace("return Strategy()", "return {}")
    fake_dist("ring-strategy", entry_points={}, files={"ring_strategy/runtime.py": wrong})
    plugin = ring(runtime="ring_strategy.runtime:build")
    suite = suite_for(StrategyConformance, plugin, builds={"trainer": "ring_strategy.runtime:Strategy"})
    assert "the runtime gave a dict for the trainer" in outcome(suite, "test_builds", tmp_path)


def test_a_good_plugin_passes_every_test(tmp_path: Path, fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist(
        "ring-strategy",
        entry_points=POINTS,
        files={"ring_strategy/plugin.py": GOOD, "ring_strategy/runtime.py": RUNTIME},
    )
    others = [FakeEntryPoint(name, target) for name, target in stand_ins().items()]
    settings = {"entry_points": [*dist.entry_points, *others], "builds": {"trainer": "ring_strategy.runtime:Strategy"}}
    for name in ("ring", "ring_small"):
        suite = type("Suite", (StrategyConformance,), {"plugin_name": name, **settings})
        assert {test: outcome(suite, test, tmp_path) for test in names_of(suite)} == dict.fromkeys(
            names_of(suite), "passed"
        )
    missing = type("Suite", (StrategyConformance,), {"plugin_name": "rings", **settings})
    assert "pip install -e ." in outcome(missing, names_of(missing)[0], tmp_path)


@pytest.mark.parametrize("heavy", ["torch", "lightning", "numpy"])
def test_a_plugin_that_imports_an_engine_is_caught(
    heavy: str, tmp_path: Path, fake_dist: Callable[..., FakeDist]
) -> None:
    """Rule 1; the engine here is an empty module of that name, so the test needs none installed."""
    source = f"import {heavy}\n"
    dist = fake_dist(
        "eager",
        entry_points={"strategy.ring": "eager_plugin:ring"},
        files={"eager_plugin.py": source, f"{heavy}.py": ""},
    )
    suite = type("Suite", (StrategyConformance,), {"plugin_name": "ring", "entry_points": dist.entry_points})
    assert outcome(suite, "test_loading_imports_no_engine", tmp_path).startswith(
        f"strategy.ring: importing eager_plugin imports {heavy}"
    )
    assert heavy not in sys.modules or sys.modules[heavy].__file__ != str(dist.path / f"{heavy}.py")


class HereEnvironmentConfig(EnvironmentConfigBase):
    """Here."""

    name: Literal["here"] = "here"


class Here(EnvironmentPlugin):
    """Claims and tells what it is told to."""

    config = HereEnvironmentConfig
    claim: Any = None
    topology: Any = Topology(True)
    job: Any = None
    why: Any = None
    unused: Any = None

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Any:
        """Its claim."""
        return self.claim(environ) if callable(self.claim) else self.claim

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Any:
        """Its topology."""
        return self.topology

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Any:
        """Its job."""
        return self.job if environ.get("X") else None

    @hookimpl
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> Any:
        """Its reason."""
        return self.why

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Any:
        """What it left."""
        return self.unused if environ.get("X") else None


def here(**attributes: Any) -> Here:
    """An environment with something changed."""
    made = type("Here", (Here,), attributes)()
    assert isinstance(made, Here)
    return made


def number(value: Any, reason: str = "X") -> Setting:
    """A setting."""
    return Setting(value, reason)


def _writes(environ: Any) -> None:
    environ["X"] = "1"


def _exports(environ: Any) -> None:
    os.environ["FAIRLEAD_TEST_ONLY"] = "1"


X = {"X": "1"}


@pytest.mark.parametrize(
    ("plugin", "test", "said"),
    [
        (here(claim=Claim("always")), "test_claims_nothing_without_evidence", "claims any process"),
        (here(claim=Claim("any", Specificity.MACHINE)), "test_claims_nothing_without_evidence", "passed"),
        (here(claim=True), "test_claims_nothing_without_evidence", "gave a bool"),
        (here(claim=Claim("")), "test_claims_nothing_without_evidence", "has no evidence"),
        (here(claim=staticmethod(_exports)), "test_claims_nothing_without_evidence", "changed os.environ"),
        (here(claim=None), "test_claims_its_own", "does not claim its own example_environ"),
        (here(topology={}), "test_topology_is_consistent", "gave a dict"),
        (here(topology=Topology(True, world_size=2)), "test_topology_is_consistent", "not a Setting"),  # type: ignore[arg-type]  # what is tested
        (here(topology=Topology(True, world_size=number(2, ""))), "test_topology_is_consistent", "has no reason"),
        (here(topology=Topology(True, world_size=number("2"))), "test_topology_is_consistent", "not a number"),
        (
            here(topology=Topology(True, global_rank=number(2), world_size=number(2))),
            "test_topology_is_consistent",
            "global_rank is 2",
        ),
        (here(topology=Topology(True, node_rank=number(-1))), "test_topology_is_consistent", "node_rank is -1"),
        (
            here(topology=Topology(True, local_world_size=number(4), world_size=number(2))),
            "test_topology_is_consistent",
            "more ranks",
        ),
        (here(requeue=""), "test_names_its_requeuer", "there is no such requeuer"),
        (here(requeue="slrm"), "test_names_its_requeuer", "`requeue` is 'slrm'"),
        (here(job=7), "test_its_job_is_usable", "gave a int"),
        (here(job=Job("7")), "test_its_job_is_usable", "is not `scheduler:id`"),
        (here(job=Job("nova:7", requeue="nova again")), "test_its_job_is_usable", "is a text"),  # type: ignore[arg-type]  # what is tested
        (here(job=Job("nova:7")), "test_its_job_is_usable", "passed"),
        (here(why="killed"), "test_says_why_without_its_scheduler", "gave a str"),
        (here(why=StopReason("cancelled", "x")), "test_says_why_without_its_scheduler", "says 'cancelled' without"),
        (here(why=StopReason("unknown", "x")), "test_says_why_without_its_scheduler", "passed"),
        (here(unused="2 nodes"), "test_what_is_unused_is_reported", "gave a str"),
        (here(unused=Unused("2 nodes", "", "nrun")), "test_what_is_unused_is_reported", "an empty part"),
    ],
)
def test_a_bad_environment_is_caught(
    plugin: Any, test: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRLEAD_TEST_ONLY", "0")
    assert said in outcome(suite_for(EnvironmentConformance, plugin, example_environ=X), test, tmp_path)


def test_detection_cannot_write_the_environment(tmp_path: Path) -> None:
    suite: Any = suite_for(EnvironmentConformance, here(claim=staticmethod(_writes)), example_environ=X)
    with pytest.raises(Exception, match=r"fairlead_detect of environment\.here raised TypeError"):
        suite().test_claims_its_own()


class BadAcceleratorConfig(AcceleratorConfigBase):
    """Bad."""

    name: Literal["bad"] = "bad"


def test_a_bad_accelerator_is_caught(tmp_path: Path) -> None:
    def probing(*answer: Any) -> Any:
        def fairlead_devices(self: Any, environ: Mapping[str, str]) -> Any:
            return answer[0]

        from fairlead import AcceleratorPlugin

        hooks = {"fairlead_devices": hookimpl(fairlead_devices)} if answer else {}
        return type("Bad", (AcceleratorPlugin,), {"config": BadAcceleratorConfig, **hooks})()

    for plugin, said in (
        (probing(), "does not implement fairlead_devices"),
        (probing(3), "gave a int"),
        (probing(Devices(-1, "x")), "-1 devices"),
        (probing(Devices(1, "")), "has no evidence"),
        (probing(Devices(1, "x")), "passed"),
    ):
        assert said in outcome(suite_for(AcceleratorConformance, plugin), "test_probe_counts_devices", tmp_path)
    no_device = suite_for(AcceleratorConformance, probing(Devices(0, "x")))
    assert "this machine has no such device" in outcome(no_device, "test_builds", tmp_path)


class StopRequeueConfig(RequeueConfigBase):
    """Stops."""

    name: Literal["stop"] = "stop"


class Stop(RequeuePlugin):
    """Stops."""

    config = StopRequeueConfig


REQUEUE = """
    import subprocess
    from fairlead import Requeuer
    from fairlead.errors import ConfigError

    class Works(Requeuer):
        def requeue(self): return "done"

    class Asks(Requeuer):
        def requeue(self): return subprocess.run(["nova"], check=True, capture_output=True, text=True).stdout

    class Silent(Requeuer):
        def requeue(self): return None

    class Signal(Works):
        exit_code = 143

    works, asks, silent, signal = Works.build, Asks.build, Silent.build, Signal.build
    def does_not(config, context): return object()
    def says_why(config, context):
        raise ConfigError("no scheduler here")
"""


@pytest.mark.parametrize(
    ("runtime", "test", "said"),
    [
        ("works", "test_builds", "passed"),
        ("does_not", "test_builds", "gave a object"),
        ("says_why", "test_builds", "skipped: requeue.stop says why"),
        ("works", "test_requeues", "passed"),
        ("asks", "test_requeues", "raised CalledProcessError"),  # of the stand-in that refuses
        ("silent", "test_requeues", "gave a NoneType"),
        ("works", "test_its_exit_code_is_distinct", "passed"),
        ("signal", "test_its_exit_code_is_distinct", "its exit_code is 143"),
    ],
)
def test_a_bad_requeuer_is_caught(
    runtime: str, test: str, said: str, tmp_path: Path, fake_dist: Callable[..., FakeDist]
) -> None:
    fake_dist("stop", entry_points={}, files={"stop_requeue.py": REQUEUE})
    plugin = type("Stop", (Stop,), {"runtime": f"stop_requeue:{runtime}"})()
    suite = suite_for(RequeueConformance, plugin, commands=("nova",))
    assert said in outcome(suite, test, tmp_path)


COMMAND = """
    def good(parser): parser.add_argument("job", help="a job")
    def bare(parser): parser.add_argument("--quietly")
    def run(arguments, session): return 0
    def fails(arguments, session): raise KeyError("no such thing")
    def refuses(arguments, session):
        from fairlead.errors import ConfigError
        raise ConfigError("there is no such job")
"""


@pytest.mark.parametrize(
    ("settings", "test", "said"),
    [
        ({}, "test_arguments_are_described_without_engines", "passed"),
        ({}, "test_runtime_is_importable", "passed"),
        (
            {"arguments": "my_command:bare"},
            "test_arguments_are_described_without_engines",
            "no help for the arguments quietly",
        ),
        ({"arguments": "my_command:nope"}, "test_arguments_are_described_without_engines", "not callable"),
        ({"runtime": "my_command:nope"}, "test_runtime_is_importable", "not callable"),
        ({"help": ""}, "test_is_named_as_its_entry_point", "no help"),
        ({"example": ("job.yaml",)}, "test_helps_and_runs", "passed"),
        ({}, "test_helps_and_runs", "there is no example"),
        ({"example": ("job.yaml",), "runtime": "my_command:refuses"}, "test_helps_and_runs", "passed"),
        ({"example": ("job.yaml",), "runtime": "my_command:fails"}, "test_helps_and_runs", "raised KeyError"),
        ({"help": "a\nb"}, "test_is_named_as_its_entry_point", "one line"),
        ({"name": "yours"}, "test_is_named_as_its_entry_point", "the command is called 'yours'"),
        ({"engines": ("no-such-engine",)}, "test_runtime_is_importable", "skipped: command.mine: the engine is not"),
    ],
)
def test_a_bad_command_is_caught(
    settings: dict[str, Any], test: str, said: str, tmp_path: Path, fake_dist: Callable[..., FakeDist]
) -> None:
    fake_dist("mine", entry_points={}, files={"my_command.py": COMMAND})
    defaults = {"name": "mine", "help": "h", "arguments": "my_command:good", "runtime": "my_command:run"}
    command = CommandPlugin(**{**defaults, **settings})
    assert said in outcome(suite_for(CommandConformance, command, name="mine"), test, tmp_path)


def test_an_environment_without_an_example_fails(tmp_path: Path) -> None:
    """It was a skip once: a plugin of which nothing had been tried passed."""
    assert "there is no example_environ" in outcome(
        suite_for(EnvironmentConformance, here()), "test_has_an_example", tmp_path
    )
    given = suite_for(EnvironmentConformance, here(example_environ=X))
    assert outcome(given, "test_has_an_example", tmp_path) == "passed"


def test_every_failure_ends_with_what_to_do() -> None:
    """Each assertion of the suites names its plugin, what is wrong and what the author should do."""
    asserts = 0
    for name in ("conformance", "environments", "checkpoints", "suites"):
        source = Path(inspect.getfile(importlib.import_module(f"fairlead.testing.{name}"))).read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assert) and not _narrows(node):
                asserts += 1
                assert isinstance(node.msg, ast.Call), ast.unparse(node)
                assert ast.unparse(node.msg.func) == "self.broken", ast.unparse(node)
    assert asserts > 40


def _narrows(node: ast.Assert) -> bool:
    """`assert isinstance(plugin, EnvironmentPlugin)`, for the type checker: what is loaded is one."""
    return node.msg is None and ast.unparse(node.test).startswith("isinstance(")


def test_the_suites_run_without_a_test_file(
    tmp_path: Path, fake_dist: Callable[..., FakeDist], capsys: pytest.CaptureFixture[str]
) -> None:
    """`fairlead plugins check DIST`: what is wrong, what to do, and an exit code for a CI."""
    bad = GOOD.replace("Mebibytes.", "")
    dist = fake_dist(
        "ring-strategy",
        entry_points=POINTS,
        files={"ring_strategy/plugin.py": bad, "ring_strategy/runtime.py": RUNTIME},
    )
    others = [FakeEntryPoint(name, target) for name, target in stand_ins().items()]
    plugins = PluginManager([*dist.entry_points, *others, FakeEntryPoint("command.plugins", commands.plugins)])
    assert main(["plugins", "check", "Ring_Strategy"], plugins=plugins, cwd=tmp_path) == 1
    said = capsys.readouterr().out
    assert "strategy.ring " in said
    assert "no docstring under the fields bucket_cap_mb" in said
    assert "do: say what each is" in said
    assert "accelerator.cpu" not in said
    assert main(["plugins", "check", "rang-strategy"], plugins=plugins, cwd=tmp_path) == 2
    assert "did you mean 'ring-strategy'?" in capsys.readouterr().err
