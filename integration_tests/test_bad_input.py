"""Every mistake a user may make: the right exit code, one block that names the place, nothing written or lost."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fairlead.install import install_line
from fairlead.testing import write_dist
from integration_tests.jobs import JOB, MODEL, Call, changed, dedent, fairlead, repository, tree

ALONE = ("--set", "trainer.devices=1")


def refused(
    tmp_path: Path, *words: str, says: Sequence[str], commands: Sequence[str] = ("check", "fit"), **environ: str
) -> None:
    """Both commands refuse with exit code 2, one block with these texts, and change nothing."""
    before = tree(tmp_path)
    for command in commands:
        call = fairlead(command, *words, cwd=tmp_path, environ=environ)
        one_block(call, says, 2)
        assert tree(tmp_path) == before, command


def one_block(call: Call, says: Sequence[str], code: int) -> None:
    assert call.code == code, call.text
    assert "Traceback" not in call.text
    blocks = re.findall(r"^error(?:\[[a-z-]+\])?: .*(?:\n .*)*", call.err, re.MULTILINE)
    assert len(blocks) == 1, call.err
    assert call.err.endswith(f"{blocks[0]}\n")  # it has the last word
    for text in ("\n  where: ", *says):
        assert text in blocks[0], call.err


def job_file(tmp_path: Path, text: str) -> str:
    """A job file of this text beside the repository's own."""
    repository(tmp_path / "repo")
    path = tmp_path / "repo" / "jobs" / "wrong.yaml"
    path.write_text(dedent(text))
    return "repo/jobs/wrong.yaml"


WHOLE = """
    model: {{class: "mine.model:Model", args: {args}}}
    data: {{class: "mine.model:Data"}}
    trainer:
      accelerator: {accelerator}
      {line}
    """


def whole(tmp_path: Path, line: str = "max_steps: 1", *, args: str = "{width: 4}", accelerator: str = "cpu") -> str:
    return job_file(tmp_path, WHOLE.format(line=line, args=args, accelerator=accelerator))


LINE = "repo/jobs/wrong.yaml:5, trainer."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("strategy: dpp", [LINE + "strategy", "unknown strategy 'dpp'", "installed: ", "did you mean 'ddp'?"]),
        ("strategy: {name: ddp, bucket_cap: 3}", ["trainer.strategy.bucket_cap", "bucket_cap_mb"]),
        ("max_steps: many", [LINE + "max_steps", "'many'", "integer"]),
        ("max_steps: 1.5", [LINE + "max_steps", "integer"]),
        ("max_stepz: 3", [LINE + "max_stepz", "unknown field", "did you mean 'max_steps'?"]),
        ("precision: 16-mixed", [LINE + "precision", "float16", "bf16-mixed"]),
        (
            "strategy: {name: deepspeed, config: {gradient_accumulation_steps: 4}}",
            ["trainer.strategy.config.gradient_accumulation_steps", ": 4", "accumulate_grad_batches: 1"],
        ),
        ("{precision: 32-true, plugins: [{name: precision.half}]}", ["precision", "set twice", "keep one"]),
        ("callbacks: [{class: 'mine.model:Nothing'}]", ["trainer.callbacks[0]", "Nothing"]),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_wrong_setting(tmp_path: Path, line: str, says: list[str]) -> None:
    if line.startswith("{"):
        job = job_file(tmp_path, "model: {class: 'mine.model:Model'}\ntrainer: " + line)
    else:
        job = whole(tmp_path, line)
    refused(tmp_path, job, says=says)


def test_a_plugin_that_is_not_installed_comes_with_its_pip_line(tmp_path: Path) -> None:
    job = whole(tmp_path, "precision: transformer-engine")
    before = tree(tmp_path)
    for command in ("check", "fit"):
        call = fairlead(command, job, cwd=tmp_path)
        assert call.code == 2
        assert install_line("transformer-engine") in call.err
        assert "Traceback" not in call.text
    assert tree(tmp_path) == before


@pytest.mark.full
def test_more_devices_than_there_are(tmp_path: Path) -> None:
    """An information on a login node, an error where the job would start."""
    job = whole(tmp_path, "devices: 99", accelerator="auto")
    assert fairlead("check", job, cwd=tmp_path).code in (0, 2)  # 2 where this machine has an accelerator
    refused(tmp_path, job, says=[LINE + "devices", "99", "devices: "], commands=("fit",))


def test_hardware_that_is_not_there(tmp_path: Path) -> None:
    job = whole(tmp_path, accelerator="mps")
    assert fairlead("check", job, cwd=tmp_path).code in (0, 2)
    refused(
        tmp_path, job, says=["wrong.yaml:4, trainer.accelerator", "'mps' is not on this machine"], commands=("fit",)
    )


def test_a_file_that_is_no_job(tmp_path: Path) -> None:
    syntax = job_file(tmp_path, "run: {name: x}\nmodel:\n  class: a:B\n   args: {}\n")
    refused(tmp_path, syntax, says=["not YAML", "wrong.yaml:4"])
    refused(tmp_path, "missing.yaml", says=["no such file", "missing.yaml"])
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    refused(tmp_path, "binary.yaml", says=["binary", "binary.yaml"])
    (tmp_path / "empty.yaml").touch()
    refused(tmp_path, "empty.yaml", says=["empty"])
    refused(tmp_path, str(tmp_path), says=[tmp_path.name])


def test_numbers_and_durations_are_read_as_they_are_meant(tmp_path: Path) -> None:
    """YAML 1.2: `1e-3` is a number, `24:00:00` is a day and not 86400, `off` is a word."""
    job = whole(tmp_path, "max_time: 24:00:00", args="{width: 4, lr: 1e-3}")
    call = fairlead("explain", job, "--json", cwd=tmp_path)
    assert call.code == 0, call.text
    assert '"value": "1 day' in call.out or "P1D" in call.out or "24:00:00" in call.out or "01:00:00:00" in call.out
    wrong = whole(tmp_path / "second", "max_steps: off")
    refused(tmp_path / "second", wrong, says=["'off'", "integer"])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("mine.modle:Model", ["model.class", "no module 'mine.modle'", "looked in", "did you mean mine.model?"]),
        ("qqzz.there:Model", ["model.class", "no module 'qqzz'", "run.code"]),
        ("mine.model:Modle", ["model.class", "no 'Modle'", "did you mean mine.model:Model?"]),
        ("mine.broken:Model", ["broken.py:2", "invalid syntax"]),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, model: str, says: list[str]) -> None:
    job = repository(tmp_path / "repo", job=changed(JOB, model={"class": model}))
    (tmp_path / "repo" / "mine" / "broken.py").write_text("class Model:\n  def (\n")
    refused(tmp_path, str(job), says=says)


def test_a_wrong_argument_of_the_model(tmp_path: Path) -> None:
    job = whole(tmp_path, args="{layres: 4}")
    model = tmp_path / "repo" / "mine" / "model.py"
    model.write_text(MODEL.replace("width=4", "layers=4").replace("width", "layers"))
    refused(tmp_path, job, says=["wrong.yaml:1, model.args.layres", "Model takes no argument 'layres'", "layers"])


@pytest.mark.slow
def test_nothing_says_what_to_train_or_test_on(tmp_path: Path) -> None:
    """The sources say whether a model has loaders of its own; no frames of Lightning's are shown."""
    job = {name: section for name, section in JOB.items() if name != "data"}
    file = str(repository(tmp_path / "repo", job=job))
    says = ["the job names no data", "Model does not define train_dataloader()", "data: {class: my_module:MyData}"]
    refused(tmp_path, file, *ALONE, says=says)
    file = str(repository(tmp_path / "whole"))
    model = tmp_path / "whole" / "mine" / "model.py"
    model.write_text(MODEL.replace("test_dataloader = ", ""))
    refused(
        tmp_path,
        file,
        *ALONE,
        "--resume",
        "never",
        says=["Data does not define test_dataloader()", "define test_dataloader() in Data"],
        commands=["test"],
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_model_that_raises_on_import(tmp_path: Path) -> None:
    """`check` never runs the user's code; `fit` shows their frames, and only these."""
    job = str(repository(tmp_path / "repo"))
    (tmp_path / "repo" / "mine" / "model.py").write_text(MODEL + "\nopen('there_is_no_such_file')\n")
    assert fairlead("check", job, cwd=tmp_path).code == 0
    before = tree(tmp_path)
    call = fairlead("fit", job, *ALONE, cwd=tmp_path)
    one_block(call, ["importing mine.model failed", "mine/model.py", "FileNotFoundError"], 2)
    assert "site-packages" not in call.err
    assert tree(tmp_path) == before


@pytest.mark.full
def test_a_broken_plugin_matters_only_where_it_is_used(tmp_path: Path) -> None:
    job = repository(tmp_path / "repo")
    broken = "import does_not_exist\n"
    write_dist(
        tmp_path / "site",
        "broken-thing",
        entry_points={"strategy.broken": "broken_thing:plugin", "environment.broken": "broken_thing:environment"},
        files={"broken_thing/__init__.py": broken},
    )
    path = str(tmp_path / "site")
    good = fairlead("check", str(job), cwd=tmp_path, environ={"PYTHONPATH": path})
    assert good.code == 0, good.text
    assert "ok" in good.out
    listed = fairlead("plugins", cwd=tmp_path, environ={"PYTHONPATH": path})
    assert listed.code == 0
    assert re.search(r"broken .*broken-thing.*does_not_exist", listed.out), listed.out
    refused(
        tmp_path,
        *(str(job), "--set", "trainer.strategy=broken"),
        says=["trainer.strategy", "broken-thing", "does_not_exist", "pip uninstall"],
        PYTHONPATH=path,
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo"))
    (tmp_path / "runs").write_text("a file in the way")
    refused(tmp_path, job, *ALONE, says=["run directory", "runs"], commands=("fit",))
    assert (tmp_path / "runs").read_text() == "a file in the way"

    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    place = "/proc/fairlead" if os.geteuid() == 0 else str(locked)  # root may write wherever a bit says no
    refused(tmp_path, job, *ALONE, "--set", f"run.dir={place}", says=["cannot", place], commands=("fit",))

    (tmp_path / "mine" / "small").mkdir(parents=True)
    (tmp_path / "mine" / "small" / "thesis.tex").write_text("years of work")
    refused(tmp_path, job, *ALONE, "--set", "run.dir=mine", says=["not empty", "thesis.tex"], commands=("fit",))


@pytest.mark.slow
def test_a_run_directory_of_another_run_and_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo"))
    done = fairlead("fit", job, *ALONE, cwd=tmp_path)
    assert done.code == 0, done.text
    other = ("--set", "model.args.lr=0.5")
    refused(
        tmp_path, job, *ALONE, *other, says=["other settings", "model.args.lr", "--resume never"], commands=("fit",)
    )

    checkpoint = next(path for path in (tmp_path / "runs/small/checkpoints").iterdir() if path.name.startswith("step-"))
    before = tree(tmp_path / "runs" / "small")
    wider = ("--set", "model.args.width=8", "--set", "run.name=wider", "--resume", str(checkpoint))
    call = fairlead("fit", job, *ALONE, *wider, cwd=tmp_path)
    one_block(call, ["of another model", checkpoint.name, "size mismatch for layer.weight"], 2)
    assert tree(tmp_path / "runs" / "small") == before
    one_block(
        fairlead("validate", job, *ALONE, *wider, cwd=tmp_path),
        ["of another model", "size mismatch for layer.weight"],
        2,
    )

    says = ["where: --resume nowhere.ckpt", "a run directory"]
    refused(tmp_path, job, *ALONE, "--resume", "nowhere.ckpt", says=says, commands=("fit", "validate"))
