"""The command line: exit codes, the shapes of --json, and no traceback for a mistake of the user's."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager, own_checks
from fairlead.cli import commands, main
from fairlead.install import install_line
from fairlead.plugin_classes import CommandPlugin
from fairlead.testing import FakeEntryPoint, stand_ins

CORE = {
    **{f"command.{name}": getattr(commands, name) for name in commands.__all__},
    "check.code": own_checks.user_code,
}
MODEL = "class Net:\n    def __init__(self, layers: int = 2, width: int = 8) -> None: ...\n"
CONTRACT = [
    "environment",
    "accelerator",
    "devices",
    "num_nodes",
    "world_size",
    "global_rank",
    "local_rank",
    "node_rank",
    "main_address",
    "main_port",
    "strategy",
    "precision",
    "checkpoint_io",
    "requeue",
    "resume",
]


class Run:
    """Runs the command line in a folder and keeps what it wrote."""

    def __init__(self, cwd: Path, plugins: PluginManager, capsys: pytest.CaptureFixture[str]) -> None:
        self.cwd, self.plugins, self._capsys = cwd, plugins, capsys
        self.out = self.err = ""

    def __call__(self, *words: str, environ: Mapping[str, str] | None = None) -> int:
        code = main(words, plugins=self.plugins, environ=environ or {}, cwd=self.cwd)
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.out + self.err
        return code

    def json(self, *words: str) -> Any:
        """The one document on stdout; nothing on stderr."""
        self(*words, "--json")
        assert self.err == ""
        return json.loads(self.out)

    def write(self, text: str, name: str = "job.yaml") -> None:
        """Writes a file into the folder."""
        (self.cwd / name).write_text(textwrap.dedent(text))


@pytest.fixture
def run(
    tmp_path: Path,
    fairlead_plugins: Callable[..., PluginManager],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """A folder with a model, and the plugins that a CPU job needs."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # a job in Python is imported from this folder
    made = Run(tmp_path, fairlead_plugins(CORE, stand_ins()), capsys)
    made.write(MODEL, "net.py")
    made.write("model: {class: net:Net, args: {layers: 4}}\ntrainer: {max_steps: 10}\n")
    yield made
    sys.modules.pop("net", None)


def test_help_and_version(run: Run) -> None:
    assert run("--help") == 0
    for command in commands.__all__:
        assert f"  {command} " in run.out
    columns = {
        line.index(line.split()[1], 2 + len(line.split()[0])) for line in run.out.splitlines() if line[:2] == "  "
    }
    assert len(columns) == 1, "the descriptions stand below each other"
    assert run("--version") == 0
    assert run.out.startswith("fairlead 0")
    assert run() == 2
    for command in commands.__all__:
        assert run(command, "--help") == 0
        assert "usage: fairlead" in run.out
        assert "--json" in run.out or command == "schema"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek"], "did you mean 'check'?"),
        (["--chek"], "unknown option"),
        (["check"], "JOB"),
        (["check", "job.yaml", "--no"], "--no"),
        (["check", "job.yaml", "--stri"], "--stri"),
        (["fit", "job.yaml"], install_line("lightning")),
        (["plugins", "--axis", "stratgy"], "did you mean 'strategy'?"),
    ],
)
def test_a_wrong_call_is_2(run: Run, words: list[str], said: str) -> None:
    assert run(*words) == 2
    assert run.out == ""
    assert run.err.startswith("error: ")
    assert said in run.err


def test_check(run: Run) -> None:
    assert run("check", "job.yaml") == 0
    assert run.out == "job.yaml: ok\n"
    assert run.json("check", "job.yaml") == {"ok": True, "findings": []}


def test_check_finds_a_misspelt_argument_without_importing(run: Run) -> None:
    run.write("raise RuntimeError('imported')\n" + MODEL, "net.py")
    run.write("model:\n  class: net:Net\n  args:\n    layres: 4\n")
    assert run("check", "job.yaml") == 2
    assert "error[argument-unknown]: Net takes no argument 'layres'" in run.err
    assert "job.yaml:4, model.args.layres" in run.err
    document = run.json("check", "job.yaml")
    assert document["ok"] is False
    (finding,) = document["findings"]
    assert list(finding) == ["severity", "code", "where", "what", "why", "fix"]
    assert "layers" in finding["fix"]


def test_a_warning_is_2_only_with_strict(run: Run) -> None:
    words = ("check", "job.yaml", "--set", "trainer.devices=9999", "--set", "trainer.accelerator=cpu")
    assert run(*words) == 0
    assert run.out.splitlines()[0].startswith("warning[oversubscribed]")
    assert run.out.splitlines()[-1] == "job.yaml: ok (1 warning)"
    assert run(*words, "--strict") == 2
    assert run.json(*words, "--strict")["ok"] is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {class: net:Net, args: {lr: 1e-3}}", "argument-unknown"),
        ("model: {class: nte:Net}", "module-not-found"),
        ("model: {class: net:Nte}", "class-not-found"),
        ("model: {class: net:Net\n", "job.yaml:"),
        ("model: net:Net\nmodel: x\n", "job.yaml:2"),
        ("model: net:Net\ntrainer: {devices: 0}", "wrong-value"),
        ("model: net:Net\ntrainer: {strategy: dpp}", "unknown-tag"),
        ("\0", "binary"),
        ("model: {class: net:Net, args: [1]}", "wrong-type"),
        ("model: net:Net\nrun: {code: nowhere}", "run.code"),
    ],
)
def test_bad_jobs_are_2_and_name_the_place(run: Run, text: str, said: str) -> None:
    run.write(text)
    assert run("check", "job.yaml") == 2
    assert said in run.err
    assert "job.yaml" in run.err or said == "run.code"
    assert run("explain", "job.yaml") == 2
    assert not (run.cwd / "runs").exists()


@pytest.mark.parametrize("job", ["missing.yaml", ".", "net:nothing", "nope:job", "a\0b", ""])
def test_what_is_no_job(run: Run, job: str) -> None:
    assert run("check", job) == 2
    assert run.err.startswith("error: ")


def test_explain_gives_every_setting_with_its_reason(run: Run) -> None:
    document = run.json("explain", "job.yaml", "--set", "trainer.devices=2")
    assert list(document) == ["settings", "findings"]
    settings = document["settings"]
    assert set(CONTRACT) <= settings.keys()
    assert all(set(setting) == {"value", "reason"} for setting in settings.values())
    assert settings["devices"] == {"value": 2, "reason": "--set trainer.devices"}
    assert settings["max_steps"] == {"value": 10, "reason": "job.yaml:2, trainer.max_steps"}
    assert settings["min_steps"]["reason"] == "the default"
    assert settings["resume"]["value"] == "auto"
    assert "run.resume" not in settings
    assert run("explain", "job.yaml") == 0
    lines = run.out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["environment", "accelerator"]
    assert {"max_steps", "precision"} <= {line.partition(" ")[0] for line in lines}
    assert "min_steps" not in run.out  # nobody has set it
    assert run("explain", "job.yaml", "--all") == 0
    assert "min_steps" in run.out


def test_for_needs_resources(run: Run) -> None:
    assert run("check", "job.yaml", "--for", "resources") == 2
    assert "profile-missing" in run.err
    assert run("check", "job.yaml", "--for", "laptop", "--set", "resources={nodes: 2}") == 2
    assert "there is no profile 'laptop'" in run.err


def test_plugins(run: Run) -> None:
    bad = {"strategy.bad": ImportError("no ring")}
    run.plugins = PluginManager(
        [FakeEntryPoint(name, target) for name, target in {**CORE, **stand_ins(), **bad}.items()]
    )
    document = run.json("plugins", "--axis", "strategy")
    assert [list(record) for record in document] == [
        ["axis", "name", "dist", "version", "available", "missing", "error"]
    ] * 3
    assert [(r["name"], r["available"], r["error"]) for r in document] == [
        ("bad", False, "ImportError: no ring"),
        ("ddp", True, None),
        ("single_device", True, None),
    ]
    assert run("plugins") == 0
    assert "broken      ? ?: ImportError: no ring" in run.out
    assert run("check", "job.yaml") == 0  # rule 9: nobody selected it


def test_plugins_name_missing_engines(run: Run) -> None:
    needy = CommandPlugin(
        "needy", "needs", arguments="fairlead.cli.job:job_arguments", runtime="x:y", engines=("no-such-engine>=2",)
    )
    run.plugins = PluginManager(
        [FakeEntryPoint(name, target) for name, target in {**CORE, "command.needy": needy}.items()]
    )
    assert run("plugins", "--axis", "command") == 0
    assert "needs no-such-engine>=2; pip install 'no-such-engine>=2'" in run.out
    missing = {record["name"]: record["missing"] for record in run.json("plugins", "--axis", "command")}
    assert missing.pop("needy") == ["no-such-engine>=2"]
    assert not any(missing.values())
    assert run("needy", "job.yaml") == 2
    assert "pip install 'no-such-engine>=2'" in run.err


def test_a_broken_command_is_listed_and_refused(run: Run) -> None:
    run.plugins = PluginManager(
        [*(FakeEntryPoint(n, t) for n, t in CORE.items()), FakeEntryPoint("command.bad", ImportError("no"))]
    )
    assert run("--help") == 0
    assert "not usable:" in run.out
    assert run("bad") == 2
    assert "ImportError: no" in run.err
    assert run("check", "job.yaml") == 2  # nothing else is installed here
    assert "plugin-missing" in run.err


def test_schema(run: Run) -> None:
    assert run("schema") == 0
    schema = json.loads(run.out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["anyOf"] == [{"required": ["model"]}, {"required": ["extends"]}]
    assert run("schema", "-o", "job.schema.json") == 0
    assert json.loads((run.cwd / "job.schema.json").read_text()) == schema
    assert run("schema", "-o", "no/such/folder.json") == 2
    assert "no/such" in run.err


def fails(arguments: Any, session: Any) -> int:
    """A command with a defect."""
    raise ZeroDivisionError("oh")


def nothing(parser: Any) -> None:
    """No arguments."""


def test_a_defect_is_one_block_and_1(fake_dist: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "def fails(arguments, session): raise ZeroDivisionError('oh')\ndef nothing(parser): ...\n"
    fake_dist("defect", entry_points={}, files={"defect_command.py": source})
    command = CommandPlugin("bad", "b", arguments="defect_command:nothing", runtime="defect_command:fails")
    plugins = PluginManager([FakeEntryPoint("command.bad", command)])
    assert main(["bad"], plugins=plugins, environ={}, cwd=tmp_path) == 1
    assert "ZeroDivisionError: oh" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main(["bad", "--debug"], plugins=plugins, environ={}, cwd=tmp_path)


def test_a_debug_behind_the_script_is_the_scripts(fake_dist: Any, tmp_path: Path) -> None:
    source = (
        "def script(parser): parser.add_argument('words', nargs='*', help='w')\n"
        "def run(arguments, session): session.print(f'{arguments.words} {session.debug}'); return 0\n"
    )
    fake_dist("scripts", entry_points={}, files={"scripts_command.py": source})
    command = CommandPlugin("run", "r", arguments="scripts_command:script", runtime="scripts_command:run")
    plugins = PluginManager([FakeEntryPoint("command.run", command)])
    for words, said in ((["--", "a.py", "--debug"], False), (["--debug", "--", "a.py", "--debug"], True)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["run", *words], plugins=plugins, environ={}, cwd=tmp_path) == 0
        assert out.getvalue() == f"['a.py', '--debug'] {said}\n"


def test_as_a_process() -> None:
    """`python -m fairlead` is the command; a reader that goes away is no error."""
    done = subprocess.run([sys.executable, "-m", "fairlead", "nope"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown command 'nope'")
    script = f"{sys.executable} -m fairlead schema | head -c 1"
    piped = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (piped.stdout, piped.stderr, piped.returncode) == ("{", "", 0)
