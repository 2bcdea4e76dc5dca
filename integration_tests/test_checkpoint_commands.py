"""`fairlead checkpoint` and `from_checkpoint` on the checkpoints of one real run, as the documentation shows them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fairlead import Run
from fairlead.cli import main
from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.commands import sources
from fairlead_distributed.testing import run_ranks
from fairlead_runs.checkpoint_job import job_from_checkpoint
from fairlead_runs.remote import Store, upload
from integration_tests.jobs import JOB, Call, changed, fairlead, repository
from integration_tests.s3 import s3_server

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "checkpoint-tools.md"
TRAINER = {
    "devices": 1,
    "strategy": "auto",
    "checkpoint": {"every_n_steps": 2, "keep_last": 9, "on_validation": False, "every_n_epochs": None},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's repository in which the job `job` was trained for eight steps with AdamW."""
    folder = tmp_path_factory.mktemp("user")
    job = repository(folder, job=changed(JOB, run={"name": "job"}, trainer=TRAINER))
    model = folder / "mine" / "model.py"
    model.write_text(model.read_text().replace("torch.optim.SGD", "torch.optim.AdamW"))
    done = fairlead("fit", str(job), cwd=folder)
    assert done.code == 0, done.text
    return folder


@pytest.fixture
def user(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "user")


@pytest.fixture
def run(user: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Call]:
    """`fairlead checkpoint ...` in this process: the command's own start is tested elsewhere."""

    def call(*words: str) -> Call:
        code = main(["checkpoint", *words], environ={}, cwd=user)
        return Call(code, *capsys.readouterr())

    return call


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A user's script."""
    script = cwd / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, script.name], cwd=cwd, capture_output=True, text=True, check=False)


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_pages_commands(run: Callable[..., Call], user: Path) -> None:
    """Each as it stands there, in the page's order, on a real run; what they leave is what it says."""
    codes = []
    for line in "".join(blocks("sh", PAGE.read_text())).splitlines():
        _, _, *words = shlex.split(line)
        done = run(*words)
        codes.append((words[0], done.code))
        assert done.code in (0, 1), (line, done.text)
    assert [code for action, code in codes if action != "diff"] == [0] * (len(codes) - 1)
    assert ("diff", 1) in codes
    ls = run("ls", "runs/job").out
    assert ls.splitlines()[-1].split()[:3] == ["step-00000008", "8", "0"]
    assert run("diff", "runs/job", "one.ckpt").code == 0
    assert {path.name for path in (user / "model").iterdir()} == {
        *("README.md", "job.yaml", "manifest.json", "weights.safetensors")
    }


def test_what_is_handed_on_can_be_loaded(run: Callable[..., Call], user: Path) -> None:
    """By plain Lightning, and by the lines in the model card; the same bits each time."""
    for words in ("convert runs/job sharded --to distributed", "consolidate sharded -o one.ckpt"):
        assert run(*words.split()).code == 0
    assert run("export", "runs/job", "-o", "model").code == 0
    card = (user / "model" / "README.md").read_text()
    for fact in ("mine.model:Model", "| step | 8 |", "| train/loss |"):
        assert fact in card, card
    (with_fairlead,) = blocks("python", card)
    check = (
        "import torch\n"
        "saved = torch.load('runs/job/checkpoints/step-00000008/state.ckpt', weights_only=True)['state_dict']\n"
        "assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())\n"
    )
    plain = "model = Model.load_from_checkpoint('one.ckpt')\n"
    done = python(with_fairlead + check + "from mine.model import Model\n" + plain + check, user)
    assert done.returncode == 0, done.stderr
    (user / "model" / "job.yaml").write_text("changed")
    assert run("verify", "model").code == 1


COMPILED = """
import torch
from lightning.pytorch import LightningModule
from mine.model import Data, Model


class Compiled(Model):
    '''Its layer is compiled, and computed again in the backward pass.'''

    def __init__(self, width):
        super().__init__(width)
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        self.layer = torch.compile(checkpoint_wrapper(self.layer), backend="eager")
"""


@pytest.mark.parametrize(
    "trainer",
    [
        {"checkpoint_io": "distributed", "strategy": "fsdp2", "devices": 2},
        pytest.param({"checkpoint_io": "torch"}, marks=pytest.mark.full),
        pytest.param({"checkpoint_io": "async"}, marks=pytest.mark.full),
        pytest.param({"checkpoint_io": {"name": "remote", "url": "file://{}/store"}}, marks=pytest.mark.full),
        pytest.param({"checkpoint_io": "torch", "strategy": "fsdp", "devices": 2}, marks=pytest.mark.full),
    ],
    ids=["distributed", "torch", "async", "remote", "fsdp"],
)
def test_what_is_exported_has_the_models_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: dict[str, Any]
) -> None:
    """Whatever its layers are wrapped in, the weights can be loaded into the model as it was written."""
    if isinstance(trainer["checkpoint_io"], dict):
        trainer = {"checkpoint_io": {"name": "remote", "url": trainer["checkpoint_io"]["url"].format(tmp_path)}}
    settings = TRAINER | {"max_steps": 2} | trainer
    sections: dict[str, Any] = {"run": {"name": "job"}, "trainer": settings}
    sections["model"] = {"class": "mine.compiled:Compiled"}
    job = repository(tmp_path, job=changed(JOB, **sections))
    (tmp_path / "mine" / "compiled.py").write_text(COMPILED)
    done = fairlead("fit", str(job), cwd=tmp_path)
    assert done.code == 0, done.text
    assert main(["checkpoint", "export", "runs/job", "-o", "model"], environ={}, cwd=tmp_path) == 0, capsys.readouterr()
    assert main(["checkpoint", "consolidate", "runs/job", "-o", "one.ckpt"], environ={}, cwd=tmp_path) == 0
    names = {"layer.weight", "layer.bias"}
    assert set(load_file(tmp_path / "model" / "weights.safetensors")) == names
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert set(state["state_dict"]) == names
    assert not [part for part in ("_orig_mod", "_wrapped_module") if part in str(state)]


@pytest.mark.full
@pytest.mark.parametrize(
    "trainer",
    [
        {"checkpoint_io": "torch", "strategy": "fsdp"},
        {"checkpoint_io": "distributed", "strategy": "fsdp"},
        {"checkpoint_io": "torch", "strategy": {"name": "hybrid", "shard": 2}},
    ],
    ids=["fsdp", "shards of fsdp", "hybrid"],
)
def test_a_resume_matches_names_whatever_wraps_the_layers(tmp_path: Path, trainer: dict[str, Any]) -> None:
    """From a checkpoint of the plain model into the compiled one, and back, with the optimizer's state."""
    job = repository(tmp_path, job=changed(JOB, trainer=TRAINER | {"devices": 2, "max_steps": 2} | trainer))
    (tmp_path / "mine" / "compiled.py").write_text(COMPILED)
    model = tmp_path / "mine" / "model.py"
    model.write_text(model.read_text().replace("torch.optim.SGD", "torch.optim.AdamW"))
    fits = [("plain", "mine.model:Model"), ("compiled", "mine.compiled:Compiled")]
    for name, cls in fits:
        done = fairlead("fit", str(job), "--set", f"run.name={name}", "--set", f"model.class={cls}", cwd=tmp_path)
        assert done.code == 0, done.text
    ends = []
    for name, cls in fits:
        for source, _ in fits:
            sets = [f"run.name={name}-{source}", f"model.class={cls}", "trainer.max_steps=4"]
            words = [word for one in sets for word in ("--set", one)]
            done = fairlead("fit", str(job), *words, "--resume", f"runs/{source}", cwd=tmp_path)
            assert done.code == 0, done.text
            words = ["checkpoint", "consolidate", f"runs/{name}-{source}", "-o", "end"]
            assert main(words, environ={}, cwd=tmp_path) == 0
            ends.append(torch.load(tmp_path / "end", weights_only=True))
            (tmp_path / "end").unlink()
    for end in ends[1:]:
        assert all(torch.equal(one, end["state_dict"][name]) for name, one in ends[0]["state_dict"].items())
        assert str(end["optimizer_states"]) == str(ends[0]["optimizer_states"])
    assert "exp_avg" in str(ends[0]["optimizer_states"])


@pytest.mark.slow
def test_a_trainer_goes_on_from_exactly_that_checkpoint(run: Callable[..., Call], user: Path) -> None:
    """From the middle of a run that went on after it, from another directory, to the same bits as without."""
    before = shutil.copytree(user / "runs/job/checkpoints/step-00000008", user / "before" / "step-00000008")
    code = (
        "import os, sys\n"
        "sys.path.insert(0, os.getcwd())\n"
        "os.makedirs('elsewhere'); os.chdir('elsewhere')\n"
        "from fairlead import Trainer\n"
        "trainer = Trainer.from_checkpoint('../runs/job/checkpoints/step-00000004')\n"
        "trainer.fit()\n"
        "assert trainer.global_step == 8, trainer.global_step\n"
        "trained, = trainer.validate(verbose=False)\n"
        "before, = trainer.validate(ckpt_path=str(trainer.rebuilt.checkpoint / 'state.ckpt'), verbose=False)\n"
        "assert trained != before\n"
    )
    done = python(code, user)
    assert done.returncode == 0, done.stderr
    said = run("diff", str(before), "runs/job/checkpoints/step-00000008.2")
    assert said.code == 0, said.out
    assert list((user / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_the_pages_python(user: Path) -> None:
    done = python("".join(blocks("python", PAGE.read_text())), user)
    assert done.returncode == 0, done.stderr
    assert (user / "runs" / "job" / "checkpoints" / "step-00000012").is_dir()


def test_the_job_of_a_checkpoint(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    runs = made / "runs"
    for path in ("runs/job", runs / "job" / "checkpoints", "runs/job/checkpoints/step-00000004/state.ckpt"):
        job = job_from_checkpoint(path)
        assert (job.model.class_, job.trainer.max_steps) == ("mine.model:Model", 8)
        assert (job.run.dir, job.run.name) == (str(runs), "job")
    job = job_from_checkpoint("runs/job", overrides=["trainer.max_steps=12", "run.name=other"])
    assert (job.trainer.max_steps, job.run.name) == (12, "other")


def test_a_checkpoint_without_a_job(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user)
    shutil.copy("runs/job/checkpoints/step-00000008/state.ckpt", "alone.ckpt")
    (user / "job.yaml").write_text("model: {class: 'not:Mine'}")  # a job that happens to lie beside it
    with pytest.raises(CheckpointError, match="carries no job"):
        job_from_checkpoint("alone.ckpt")
    with pytest.raises(CheckpointError, match="did you mean"):
        job_from_checkpoint("runs/jobs")
    with pytest.raises(ConfigError, match="max_step"):
        job_from_checkpoint("runs/job", overrides=["trainer.max_stepps=1"])
    job = user / "runs" / "job" / "job.yaml"
    job.write_text(job.read_text().replace("width: 4", "width: 4\n    api_key: <redacted>"))
    with pytest.raises(ConfigError, match="lacks a secret"):
        job_from_checkpoint("runs/job")
    assert job_from_checkpoint("runs/job", overrides=["model.args.api_key=x"]).model.args["api_key"] == "x"


def sharded_run(rank: int, folder: Path, gather: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Run(folder / "runs/loop", model=model, optimizer=optimizer, gather=gather, environ={}) as run:
        run.restore()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        run.step()
    return {name: one.full_tensor().detach() for name, one in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("gather", [False, True], ids=["shards", "gathered"])
def test_the_sharded_model_of_a_loop_is_exported_whole(
    tmp_path: Path, gather: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the names of the model; the README says how a script loads them."""
    weights = run_ranks(sharded_run, 2, tmp_path, gather)[0]
    code = main(["checkpoint", "export", "runs/loop", "-o", "model"], environ={}, cwd=tmp_path)
    assert code == 0, capsys.readouterr()
    exported = load_file(tmp_path / "model/weights.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    card = (tmp_path / "model/README.md").read_text()
    assert "Sequential" in card
    assert "load_model(model," in card
    assert "from_checkpoint" not in card


def test_several_modules_of_a_loop_are_exported_behind_their_names(tmp_path: Path) -> None:
    """Neither optimizers nor what else is registered is among them."""
    net, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()])
    with Run(tmp_path / "runs/loop", net=net, head=head, optimizer=optimizer, environ={}) as run:
        run.restore()
        run.step()
    assert main(["checkpoint", "export", "runs/loop", "-o", "model"], environ={}, cwd=tmp_path) == 0
    exported = load_file(tmp_path / "model/weights.safetensors")
    assert sorted(exported) == ["head.bias", "head.weight", "net.bias", "net.weight"]
    assert torch.equal(exported["head.weight"], head.weight)


def test_export_needs_a_job(run: Callable[..., Call], user: Path) -> None:
    shutil.copy(user / "runs/job/checkpoints/step-00000008/state.ckpt", user / "alone.ckpt")
    said = run("export", "alone.ckpt", "-o", "model")
    assert (said.code, "carries no job" in said.err, (user / "model").exists()) == (2, True, False)


@pytest.mark.full
def test_of_a_run_on_s3(run: Callable[..., Call], user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed, verified, compared and handed on from a machine that does not have it."""
    with s3_server(tmp_path) as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        s3.call("PUT", "runs-bucket")
        url = "s3://runs-bucket/prefix/job"
        store, steps = Store.open(url), sorted((user / "runs/job/checkpoints").glob("step-*"))
        for step in steps:
            upload(step, store)
        for record in ("job.yaml", "fingerprint.json"):
            store.put({record: user / "runs/job" / record})
        shutil.move(user / "runs/job", user / "elsewhere")
        s3.faults.clear()
        listed = run("ls", url)
        assert (listed.code, listed.err) == (0, "")
        assert listed.out == run("ls", "elsewhere").out
        read = [request for request in s3.faults.requests if request.startswith("GET") and "list-type" not in request]
        assert all(request.endswith(("/manifest.json", "/latest")) for request in read), read
        assert run("verify", url).out == run("verify", "elsewhere").out
        assert run("diff", f"{url}/{steps[-1].name}", "elsewhere").code == 0
        exported = run("export", url, "-o", "model")
        assert exported.code == 0, exported.err
        assert f"`job-{steps[-1].name}`" in (user / "model" / "README.md").read_text()
        assert run("verify", "model").code == 0
        store.delete([f"{steps[0].name}/manifest.json"])
        s3.faults.add("flip", "PUT", "state.ckpt")
        store.put({f"{steps[-1].name}/state.ckpt": user / "elsewhere/checkpoints" / steps[-1].name / "state.ckpt"})
        assert f"{steps[0].name}: unfinished: being uploaded" in run("ls", url).out
        damaged = run("verify", url)
        assert (damaged.code, "state.ckpt: its" in damaged.out) == (1, True)
        s3.faults.add("500", "GET", "manifest", times=1000)
        monkeypatch.setattr(sources, "_TRIES", 1)
        away = run("ls", url)
        assert (away.code, away.out, "cannot read an object" in away.err) == (2, "", True), away.err


@pytest.mark.full
def test_json_of_each(run: Callable[..., Call]) -> None:
    step = "runs/job/checkpoints/step-00000004"
    calls: Sequence[Sequence[str]] = (
        ("ls", "runs/job"),
        ("verify", "runs/job"),
        ("diff", step, "runs/job"),
        ("convert", step, "w", "--to", "safetensors"),
        ("consolidate", step),
        ("export", step, "-o", "model"),
    )
    for words in calls:
        said = run(*words, "--json")
        assert isinstance(json.loads(said.out), dict), words


# -- with Lightning's own sharded strategy


class Sharded(L.LightningModule):
    """Two shards under ModelParallelStrategy, whole elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(steps: int, checkpoint: Path | None, *, sharded: bool) -> tuple[L.Trainer, list[float]]:
    """Plain Lightning; every rank has the same data, so that the number of ranks changes nothing."""
    data: Any = [torch.randn(4, generator=torch.Generator().manual_seed(index)) for index in range(8)]
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if sharded else 1,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Sharded()
    trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=checkpoint, weights_only=True)
    return trainer, model.losses


def on_two_ranks(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Saves shards at step 4; rank 0 makes a plain file of them, and shards of that; both shards are gone on from."""
    place = Path(folder)
    trainer, _ = fit(4, None, sharded=True)
    trainer.save_checkpoint(place / "sharded")
    if rank == 0:
        words: Sequence[Sequence[str]] = (
            ("consolidate", "sharded", "-o", "one.ckpt"),
            ("convert", "one.ckpt", "again", "--to", "distributed"),
            ("diff", "sharded", "one.ckpt"),
            ("diff", "sharded", "again"),
        )
        assert [main(["checkpoint", *each], environ={}, cwd=place) for each in words] == [0, 0, 0, 0]
    torch.distributed.barrier()
    return fit(8, place / "sharded", sharded=True)[1], fit(8, place / "again", sharded=True)[1]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightnings_sharded_checkpoints_there_and_back(tmp_path: Path) -> None:
    """Real shards of two ranks -> one plain file, which one rank resumes; -> shards, which two ranks resume."""
    (before, after), _ = run_ranks(on_two_ranks, 2, str(tmp_path), timeout=150)
    assert len(before) == 4
    assert before == after
    _, alone = fit(8, tmp_path / "one.ckpt", sharded=False)
    torch.testing.assert_close(alone, before, rtol=1e-5, atol=0)
