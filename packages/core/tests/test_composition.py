"""One job out of several files: what replaces what, who is named in a message, and what variables become."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager, yaml
from fairlead.cli import commands, main
from fairlead.errors import ConfigError, FairleadError
from fairlead.interpolation import escape, interpolate
from fairlead.jobs import LoadedJob, load_job
from fairlead.testing import stand_ins

BASE = """
    run: {dir: runs, seed: 1}
    model:
      class: net:Net
      args: {layers: 2, lr: 1e-3, sizes: [1, 2], optimizer: {name: adam, betas: [0.9, 0.99]}}
    data: net:Data
    trainer:
      max_steps: 10
      strategy: ddp
      loggers: [csv, tensorboard]
"""


class Folder:
    """Files of jobs, loaded together as `fairlead` loads them."""

    def __init__(self, path: Path, plugins: PluginManager, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.plugins, self.capsys = path, plugins, capsys
        self.environ: dict[str, str] = {}
        self.write("base.yaml", BASE)

    def write(self, name: str, text: str) -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return name

    def load(self, *names: str, sets: tuple[str, ...] = ()) -> LoadedJob:
        return load_job(names, plugins=self.plugins, cwd=self.path, environ=self.environ, overrides=sets)

    def data(self, *names: str, sets: tuple[str, ...] = ()) -> Any:
        return self.load(*names, sets=sets).data

    def where(self, *names: str, sets: tuple[str, ...] = ()) -> list[tuple[str, str | None]]:
        """The findings of a job that is wrong: code and place."""
        loaded = self.load(*names, sets=sets)
        assert loaded.job is None
        return [(finding.code, finding.where) for finding in loaded.findings]

    def refused(self, *names: str, sets: tuple[str, ...] = ()) -> FairleadError:
        with pytest.raises(ConfigError) as caught:
            self.load(*names, sets=sets)
        return caught.value

    def fairlead(self, *words: str) -> tuple[int, str]:
        code = main(words, plugins=self.plugins, environ=self.environ, cwd=self.path)
        said = self.capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out + said.err


@pytest.fixture
def folder(
    tmp_path: Path, fairlead_plugins: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> Folder:
    core = {f"command.{name}": getattr(commands, name) for name in commands.__all__}
    return Folder(tmp_path, fairlead_plugins(core, stand_ins()), capsys)


# -- what replaces what


@pytest.mark.parametrize(
    ("later", "path", "value"),
    [
        ("trainer: {max_steps: 5}", "trainer", {"max_steps": 5, "strategy": "ddp", "loggers": ["csv", "tensorboard"]}),
        ("trainer: {loggers: [wandb]}", "trainer.loggers", ["wandb"]),
        ("model: {args: {sizes: [3]}}", "model.args.sizes", [3]),
        ("model: {args: {optimizer: {name: sgd}}}", "model.args.optimizer", {"name": "sgd", "betas": [0.9, 0.99]}),
        ("model: {args: {optimizer: sgd}}", "model.args.optimizer", "sgd"),
        ("model: {args: {optimizer: null}}", "model.args.optimizer", None),
        ("model: {args: {}}", "model.args", {}),
        ("model: {args: {layers: {a: 1}}}", "model.args.layers", {"a": 1}),
        ("model: {args: {sizes: {0: 5}}}", "model.args.sizes", {0: 5}),
        # As --set has it: a field of a literal makes a mapping, a name replaces the node.
        ("trainer: {strategy: {bucket_cap_mb: 50}}", "trainer.strategy", {"name": "ddp", "bucket_cap_mb": 50}),
        ("trainer: {strategy: {mode: a, name: fsdp}}", "trainer.strategy", {"mode": "a", "name": "fsdp"}),
        ("data: {args: {n: 1}}", "data", {"class": "net:Data", "args": {"n": 1}}),
        ("resources: {nodes: 2}", "resources", {"nodes": 2}),
    ],
)  # fmt: skip
def test_a_later_file_replaces_what_it_says(folder: Folder, later: str, path: str, value: Any) -> None:
    folder.write("later.yaml", later)
    folder.write("extending.yaml", "extends: base.yaml\n" + later)
    for names in (("base.yaml", "later.yaml"), ("extending.yaml",)):
        found: Any = folder.data(*names)
        assert "extends" not in found
        for part in path.split("."):
            found = found[part]
        assert found == value


def test_a_whole_strategy_is_not_mixed_with_the_one_before(folder: Folder) -> None:
    folder.write("a.yaml", "extends: base.yaml\ntrainer: {strategy: {name: ddp, bucket_cap_mb: 50}}")
    folder.write("b.yaml", "extends: a.yaml\ntrainer: {strategy: {name: fsdp}}")
    assert folder.data("b.yaml")["trainer"]["strategy"] == {"name": "fsdp"}
    assert folder.data("b.yaml", sets=("trainer.strategy.x=1",))["trainer"]["strategy"] == {"name": "fsdp", "x": 1}


def test_the_order_of_the_files(folder: Folder) -> None:
    """Bases first, each once: of two files with one base the second takes nothing of the first back."""
    folder.write("big.yaml", "extends: base.yaml\nmodel: {args: {layers: 9}}")
    folder.write("fast.yaml", "extends: base.yaml\nmodel: {args: {lr: 1}}")
    folder.write("both.yaml", "extends: [big.yaml, fast.yaml]")
    for names in (("big.yaml", "fast.yaml"), ("both.yaml",), ("base.yaml", "big.yaml", "fast.yaml")):
        args = folder.data(*names)["model"]["args"]
        assert (args["layers"], args["lr"]) == (9, 1)
    assert folder.data("big.yaml", "base.yaml")["model"]["args"]["layers"] == 2  # named last, it counts last
    folder.write("chain/more.yaml", "extends: ../big.yaml\nmodel: {args: {layers: 10}}")
    folder.write("chain/end.yaml", f"extends: [{folder.path}/chain/more.yaml]\nrun: {{seed: 3}}")
    end = folder.data("chain/end.yaml")
    assert (end["model"]["args"]["layers"], end["run"]) == (10, {"dir": "runs", "seed": 3})


def test_the_name_is_that_of_the_files(folder: Folder) -> None:
    folder.write("big.yaml", "model: {args: {layers: 9}}")
    folder.write("small.yaml", "extends: base.yaml")
    for files, name in ((("base.yaml", "big.yaml"), "base-big"), (("base.yaml",), "base"), (("small.yaml",), "small")):
        job = folder.load(*files, sets=("trainer.loggers=[]",)).job
        assert job is not None
        assert job.run.name == name


# -- who is named


def test_a_mistake_is_placed_in_the_file_that_makes_it(folder: Folder) -> None:
    folder.write("conf/base.yaml", "model: net:Net\ntrainer:\n  strategy: ddp\n  max_stpes: 3\n")
    folder.write("big.yaml", "extends: conf/base.yaml\n\ntrainer:\n  devices: one\n  num_nodes: 0\n")
    folder.write("last.yaml", "trainer:\n  num_nodes: -1\n")
    places = {where for _, where in folder.where("big.yaml", "last.yaml", sets=("trainer.max_epochs=x",))}
    assert places == {
        "conf/base.yaml:4, trainer.max_stpes",
        "--set trainer.max_epochs",
        "big.yaml:4, trainer.devices",
        "last.yaml:2, trainer.num_nodes",
    }


def test_explain_names_the_file_and_the_variable_of_each_value(folder: Folder) -> None:
    folder.write("big.yaml", "extends: base.yaml\ntrainer:\n  max_steps: ${env:STEPS}\n")
    folder.write("net.py", "class Net:\n    def __init__(self, **args): ...\nclass Data: ...\n")
    folder.environ = {"STEPS": "70"}
    code, said = folder.fairlead("explain", "big.yaml", "--set", "trainer.loggers=[]")
    assert code == 0, said
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in said.splitlines() if line}
    assert lines["max_steps"] == "70 big.yaml:3, trainer.max_steps, from STEPS"
    assert lines["strategy"] == "ddp base.yaml:9, trainer.strategy"
    assert lines["run.seed"] == "1 base.yaml:2, run.seed"


def test_check_takes_options_between_the_files(folder: Folder) -> None:
    folder.write("net.py", "class Net:\n    def __init__(self, **args): ...\nclass Data: ...\n")
    folder.write("big.yaml", "trainer: {max_steps: 9}")
    for words in (("base.yaml", "big.yaml"), ("base.yaml", "--set", "trainer.loggers=[]", "big.yaml")):
        code, said = folder.fairlead("check", *words, "--set", "trainer.loggers=[]")
        assert (code, said) == (0, "base.yaml big.yaml: ok\n")


def test_a_missing_model_is_missing_in_the_last_file(folder: Folder) -> None:
    folder.write("a.yaml", "trainer: {max_steps: 3}")
    folder.write("b.yaml", "run: {seed: 2}")
    assert folder.where("a.yaml", "b.yaml") == [("missing-field", "b.yaml:1, model")]


# -- where things are


def test_paths_are_those_of_the_file_that_says_them(folder: Folder) -> None:
    """`run.code` beside its own file; code beside a base is found, after that beside the job."""
    for place in ("shared/code", "mine", "shared"):
        folder.write(f"{place}/net.py", "")
    folder.write("shared/base.yaml", "model: net:Net\nrun: {code: code}\n")
    folder.write("mine/job.yaml", "extends: ../shared/base.yaml\n")
    assert folder.load("mine/job.yaml").root.folders[0] == folder.path / "shared/code"
    folder.write("mine/own.yaml", "extends: job.yaml\nrun: {code: .}\n")
    assert folder.load("mine/own.yaml").root.folders[0] == folder.path / "mine"
    folder.write("shared/base.yaml", "model: net:Net\n")
    cwd = folder.path / "elsewhere"
    cwd.mkdir()
    found = load_job("../mine/job.yaml", plugins=folder.plugins, cwd=cwd, environ={}).root.folders
    assert [place for place in found if place != cwd][-2:] == [folder.path / "mine", folder.path / "shared"]
    here: dict[str, Any] = {"plugins": folder.plugins, "cwd": folder.path, "environ": {}}
    assert load_job("mine/own.yaml", overrides=["run.code=shared"], **here).root.folders[0] == folder.path / "shared"
    recorded = load_job("mine/own.yaml", recorded_code=[folder.path / "shared/code"], **here)
    assert recorded.root.folders == (folder.path / "shared/code", folder.path)


# -- what is refused


def test_the_worst_files(folder: Folder) -> None:
    folder.write("a.yaml", "run: {seed: 1}\nextends: b.yaml\n")
    folder.write("b.yaml", "extends: [base.yaml, c/c.yaml]\n")
    folder.write("c/c.yaml", "extends:\n  - ../a.yaml\n")
    cycle = folder.refused("a.yaml")
    assert (cycle.what, cycle.where) == ("a.yaml extends itself", "c/c.yaml:2, extends")
    assert cycle.why == "a.yaml extends b.yaml extends c/c.yaml extends a.yaml"
    folder.write("self.yaml", "extends: self.yaml\n")
    assert folder.refused("self.yaml").why == "self.yaml extends self.yaml"

    folder.write("typo.yaml", "model: net:Net\nextends: bsae.yaml\n")
    typo = folder.refused("typo.yaml")
    assert (typo.what, typo.where) == ("extends: bsae.yaml: there is no such file", "typo.yaml:2, extends")
    assert "base.yaml" in str(typo.fix)
    folder.write("dir.yaml", "extends: c\n")
    assert folder.refused("dir.yaml").what == "extends: c: this is a folder, not a file"
    assert "there is no such file" in folder.refused("base.yaml", "nope.yaml").what

    for kind, text in (("a list", "- a\n"), ("empty", "# nothing yet\n"), ("a str", "a job\n")):
        folder.write("odd.yaml", text)
        folder.write("job.yaml", "\nextends: odd.yaml\n")
        for names in (("base.yaml", "odd.yaml"), ("odd.yaml", "base.yaml"), ("job.yaml",)):
            loaded = folder.load(*names)
            assert [f.what for f in loaded.findings] == [f"odd.yaml is {kind}, not a job"]
        assert loaded.findings[0].why == "job.yaml:2, extends names it"

    folder.write("broken.yaml", "model: [1, [2\n")
    folder.write("job.yaml", "extends: broken.yaml\n")
    broken = folder.refused("job.yaml")
    assert "broken.yaml:" in str(broken.where)
    assert "job.yaml:1, extends names it" in str(broken.why)


@pytest.mark.parametrize("given", ["null", "3", "{a: b}", "[base.yaml, 3]", "''", "[[base.yaml]]"])
def test_what_extends_no_file(folder: Folder, given: str) -> None:
    folder.write("job.yaml", f"model: net:Net\nextends: {given}\n")
    error = folder.refused("job.yaml")
    assert "not a file" in error.what
    assert error.where == "job.yaml:2, extends"
    folder.write("none.yaml", "model: net:Net\nextends: []\n")
    assert folder.load("none.yaml").job is not None


def test_extends_is_set_by_no_option(folder: Folder) -> None:
    error = folder.refused("base.yaml", sets=("extends=base.yaml",))
    assert (error.where, "name both files" in str(error.fix)) == ("--set extends", True)
    assert "extends" in folder.refused("base.yaml", sets=("extends[0]=base.yaml",)).what
    where = folder.where("base.yaml", sets=("trainer.loggers=[]", "trainer.extends=base.yaml"))
    assert where == [("unknown-field", "--set trainer.extends")]
    folder.write("job.yaml", "model: net:Net\nextend: base.yaml\nrun:\n  extends: base.yaml\n")
    fixes = [finding.fix for finding in folder.load("job.yaml").findings]
    assert fixes == ["write extends at the top of the file", "did you mean 'extends'?"]


def test_a_job_in_python_stands_alone(folder: Folder) -> None:
    assert "a complete job in Python" in folder.refused("base.yaml", "my.jobs:job").what


def test_files_with_one_key_of_two_kinds(folder: Folder) -> None:
    """The later kind counts, and where it is wrong it is named."""
    folder.write("a.yaml", "model: net:Net\ntrainer: 5\n")
    folder.write("b.yaml", "\ntrainer: {max_steps: 3}\n")
    assert folder.where("a.yaml") == [("wrong-type", "a.yaml:2, trainer")]
    assert folder.load("a.yaml", "b.yaml").job is not None
    assert folder.where("b.yaml", "a.yaml") == [("wrong-type", "a.yaml:2, trainer")]


# -- variables


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${env:N}", 4), ("'${env:N}'", "4"), ("${env:N}.5", 4.5), ("${env:F}", 0.001), ("${env:NO}", True),
        ("${env:S}/runs", "/scratch/me/runs"), ("a ${env:S} b ${env:N}", "a /scratch/me b 4"),
        ("${env:ABSENT,7}", 7), ("${env:ABSENT, 7 }", 7), ("${env:ABSENT:-7}", 7), ("${env:N,7}", 4),
        ("${env:N:-7}", 4),
        ("${env:EMPTY,7}", 7), ("${env:ABSENT,}", None), ("'${env:ABSENT,}'", ""), ("x${env:ABSENT,}", "x"),
        ("${env:ABSENT,${env:S}/b}", "/scratch/me/b"), ("${env:ABSENT,${env:ABSENT:-c}}", "c"),
        ("${env:ABSENT,a,b}", "a,b"), ("${env:ABSENT,a:-b}", "a:-b"), ("${env:T}", "24:00:00"), ("${env:L}", "[1, 2]"),
        # What is no variable stays.
        ("$HOME/${SLURM_JOB_ID} $(date) $$", "$HOME/${SLURM_JOB_ID} $(date) $$"), ("$${env:S}", "${env:S}"),
        ("costs 5$", "costs 5$"), ("${environ:S}", "${environ:S}"), ("${ENV:S}", "${ENV:S}"),
        ("${env:REFERS}", "${env:N}"),
    ],
)  # fmt: skip
def test_variables(text: str, value: Any) -> None:
    environ = {"N": "4", "F": "1e-3", "S": "/scratch/me", "T": "24:00:00", "L": "[1, 2]", "NO": "true", "EMPTY": " "}
    data = yaml.load(f"key: [x, {{a: 1}}]\ntext: {text}\n", source="job.yaml").data
    found = interpolate(data, {**environ, "REFERS": "${env:N}"})
    assert found.mistakes == {}
    assert found.data == {"key": ["x", {"a": 1}], "text": value}
    assert type(found.data["text"]) is type(value)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("${env:SCRATHC}/x", "the environment variable SCRATHC is not set", "export SCRATHC=..., or write a default"),
        ("${env:EMPTY}", "the environment variable EMPTY is empty", "export EMPTY=..."),
        ("${env:}", "names no environment variable", "${env:SCRATCH}"),
        ("${env:A B}", "names no environment variable", "${env:SCRATCH}"),
        ("${env:1A}", "names no environment variable", "${env:SCRATCH}"),
        ("${env:SCRATCH-/tmp}", "names no environment variable", "${env:SCRATCH,/tmp}"),
        ("${env:SCRATCH", "is not closed", "${env:SCRATCH}"),
        ("${env:ABSENT,${env:ALSO}}", "the environment variable ALSO is not set", "export ALSO"),
        ("${env:HF_TOKEN}", "the secret HF_TOKEN would be written", "read it from the environment"),
        ("${env:HUGE}", "beyond the largest float", "quote it"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_replaced(folder: Folder, text: str, what: str, fix: str) -> None:
    folder.environ = {"SCRATCH": "/s", "EMPTY": "", "HF_TOKEN": "hf_x", "HUGE": "1e999"}
    folder.write("job.yaml", f"extends: base.yaml\nmodel:\n  args:\n    path: {text}\n")
    loaded = folder.load("job.yaml")
    (finding,) = loaded.findings
    assert what in finding.what
    assert finding.where == "job.yaml:4, model.args.path"
    assert fix in str(finding.fix)
    if "SCRATHC" in text:
        assert finding.why == "did you mean SCRATCH?"


def test_a_value_of_the_wrong_kind_names_its_variable(folder: Folder) -> None:
    folder.environ = {"N": "two"}
    folder.write("job.yaml", "model: net:Net\ntrainer:\n  devices: ${env:N}\n")
    assert folder.where("job.yaml") == [("wrong-type", "job.yaml:3, trainer.devices, from N")]
    folder.write("flow.yaml", "model: net:Net\ntrainer: {devices: ${env:N}}\n")
    error = folder.refused("flow.yaml")
    assert "needs its own line" in str(error.fix)


def test_a_variable_that_is_not_needed_is_not_missed(folder: Folder) -> None:
    folder.write("site.yaml", "extends: base.yaml\nrun: {dir: '${env:SCRATCH}/runs'}\n")
    folder.write("mine.yaml", "extends: site.yaml\nrun: {dir: here}\n")
    assert folder.where("site.yaml") == [("variable-missing", "site.yaml:2, run.dir")]
    assert folder.load("mine.yaml").data["run"]["dir"] == "here"
    assert folder.data("site.yaml", sets=("run.dir=there",))["run"]["dir"] == "there"
    folder.environ = {"SCRATCH": "/s", "CONF": "base.yaml"}
    assert folder.data("site.yaml")["run"]["dir"] == "/s/runs"
    assert folder.data("base.yaml", sets=("trainer.max_steps=${env:N,5}",))["trainer"]["max_steps"] == 5
    folder.write("by-name.yaml", "extends: ${env:CONF}\n")
    assert folder.data("by-name.yaml")["model"]["class"] == "net:Net"
    folder.environ = {}
    assert folder.refused("by-name.yaml").where == "by-name.yaml:1, extends"
    assert folder.fairlead("check", "by-name.yaml")[0] == 2


def test_a_secret_stands_only_under_its_own_name(folder: Folder) -> None:
    folder.environ = {"NEPTUNE_API_KEY": "x" * 9}
    folder.write("job.yaml", "extends: base.yaml\nmodel: {args: {api_key: '${env:NEPTUNE_API_KEY}'}}\n")
    assert folder.data("job.yaml")["model"]["args"]["api_key"] == "x" * 9


@pytest.mark.parametrize("text", ["${env:X}", "$${env:X}", "a $$${env:X,b} ${env:", "$", "${env:X}${env:X}"])
def test_what_is_written_means_itself_when_it_is_read_again(text: str) -> None:
    """A run directory's `job.yaml` is a job, and no text in it becomes a variable."""
    job: Mapping[str, Any] = {"a": [text, 1], "b": {"c": text}}
    again = yaml.load(yaml.dump(escape(job)), source="job.yaml").data
    assert interpolate(again, {"X": "no"}).data == job


def test_a_job_in_python_has_no_variables(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has `os.environ`; what is set beside it is read as everywhere."""
    text = "from fairlead import JobConfig\njob = JobConfig(model={'class': 'm:N', 'args': {'a': '${env:X}'}})\n"
    folder.write("my_job_with_text.py", text)
    monkeypatch.syspath_prepend(folder.path)
    folder.environ = {"X": "3"}
    found = folder.data("my_job_with_text:job", sets=("model.args.b=${env:X}",))
    assert found["model"]["args"] == {"a": "${env:X}", "b": 3}
