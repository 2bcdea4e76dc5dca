"""The page on exporting, run as it stands on a trained run, and the C++ program of `examples/cpp`."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from fairlead.cli import main
from fairlead_checkpoint_io.commands.states import read_file
from fairlead_runs.commit import best_or_newest
from integration_tests.jobs import FAIRLEAD, fairlead

JIT: Any = torch.jit  # has no types
FUNCTIONAL: Any = torch.autograd.functional
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "export.md"
AT = (290.0, 0.5, 3.0)
JOB: dict[str, Any] = {
    "run": {"name": "job", "dir": "runs", "seed": 1},
    "model": {"class": "model:Surrogate", "args": {"width": 16}},
    "data": {"class": "model:Data"},
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "fsdp2",
        "checkpoint_io": "distributed",
        "max_steps": 20,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    },
}


def blocks(language: str) -> list[tuple[str, str]]:
    found = re.findall(rf"^```{language}(?: title=\"(.*?)\")?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [(title, text) for title, text in found]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the page's model, trained in two shards, and the example."""
    folder = tmp_path_factory.mktemp("user")
    for title, text in blocks("python"):
        (folder / title).write_text(text)
    (folder / "job.yaml").write_text(json.dumps(JOB))
    (folder / "pyproject.toml").touch()
    shutil.copytree(ROOT / "examples" / "cpp", folder / "examples" / "cpp")
    done = fairlead("fit", "job.yaml", cwd=folder)
    assert done.code == 0, done.text
    return folder


@pytest.fixture(scope="module")
def surrogate(user: Path) -> Any:
    """The trained model in Python, built from its class and the weights that `export` takes: the best ones."""
    best, _ = best_or_newest(user / "runs" / "job" / "checkpoints")
    done = fairlead("checkpoint", "consolidate", str(best.path), "-o", "whole.ckpt", cwd=user)
    assert done.code == 0, done.text
    sys.path.insert(0, str(user))
    try:
        made = __import__("model").Surrogate()
    finally:
        sys.path.remove(str(user))
    made.load_state_dict(read_file(user / "whole.ckpt")["state_dict"])
    return made.eval()


def shell(text: str, user: Path) -> subprocess.CompletedProcess[str]:
    """Lines of the page, as a user types them."""
    environ = {**os.environ, "PATH": f"{Path(FAIRLEAD).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euc", text]
    return subprocess.run(command, cwd=user, env=environ, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def exported(user: Path) -> str:
    """What the page's first commands print; in this process, as each would import torch."""
    out = io.StringIO()
    with redirect_stdout(out):
        for line in blocks("sh")[0][1].splitlines():
            assert main(shlex.split(line)[1:], environ={}, cwd=user) == 0, line
    return out.getvalue()


def test_the_pages_commands_and_output(exported: str, user: Path) -> None:
    """What differs between machines aside: sizes, the loss, and the last digits."""
    assert {path.name for path in user.glob("model.*")} == {
        *("model.py", "model.ts", "model.pt2", "model.onnx", "model.safetensors")
    }
    shown = next(text for _, text in blocks("text"))
    varies = r"\d+\.\d+ KiB|\(\d.*?\)|(?<=Python's: ).*(?=, with)"
    shown, said = (re.sub(varies, "...", text) for text in (shown, exported))
    assert said.startswith(shown)


def test_each_file_computes_what_the_trained_model_does(exported: str, user: Path, surrogate: Any) -> None:
    """Gathered from shards, without the wrappers of the training; each format, read by its own library."""
    import onnxruntime

    x = torch.randn(9, 3)
    with torch.no_grad():
        wanted = surrogate(x)["y"]
    session = onnxruntime.InferenceSession(str(user / "model.onnx"))
    found = {
        "torchscript": JIT.load(str(user / "model.ts"))(x),
        "torch-export": torch.export.load(user / "model.pt2").module()(x),
        "onnx": torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0]),
    }
    for one in found.values():
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)
    done = subprocess.run([sys.executable, "read.py"], cwd=user, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scale = surrogate.normalization["x"]
    x = (torch.tensor([[290.0, 0.5, 3.0]]) - torch.tensor(scale["mean"])) / torch.tensor(scale["std"])
    shown = [float(one) for one in re.findall(r"-?\d+\.\d+", done.stdout.splitlines()[-1])]
    torch.testing.assert_close(torch.tensor([shown]), surrogate(x)["y"].detach(), rtol=0, atol=1e-4)


def test_names_and_constants_are_in_the_file(exported: str, user: Path, surrogate: Any) -> None:
    """With shapes and dtypes, and where the weights come from."""
    files = {"fairlead.json": ""}
    JIT.load(str(user / "model.ts"), _extra_files=files)
    document = json.loads(files["fairlead.json"])
    assert document["inputs"] == [{"name": "x", "shape": ["batch", 3], "dtype": "float32"}]
    assert document["outputs"] == [{"name": "y", "shape": ["batch", 2], "dtype": "float32"}]
    assert document["normalization"] == surrogate.normalization
    best, _ = best_or_newest(user / "runs" / "job" / "checkpoints")
    assert document["checkpoint"] == f"job-{best.path.name}"


@pytest.mark.skipif(
    not (shutil.which("cmake") and Path("/usr/include/nlohmann/json.hpp").exists()) and not os.environ.get("CI"),
    reason="needs cmake and nlohmann-json3-dev",
)
def test_the_cpp_program_computes_outputs_and_derivatives(exported: str, user: Path, surrogate: Any) -> None:
    """In physical units; by autograd and by finite differences, and as autograd in Python."""
    built = next(text for _, text in blocks("sh") if "cmake" in text)
    quick = "cmake -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -S"  # compiles in half the time
    done = shell(built.replace("cmake -S", quick), user)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout[done.stdout.index("{") :])
    model, scales = surrogate.double(), surrogate.normalization

    def physical(x: torch.Tensor) -> torch.Tensor:
        (mean, std), (low, wide) = ([torch.tensor(s[k]).double() for k in ("mean", "std")] for s in scales.values())
        y: torch.Tensor = model(((x - mean) / std).unsqueeze(0))["y"][0]
        return y * wide + low

    try:
        x = torch.tensor(AT, dtype=torch.float64)
        wanted = FUNCTIONAL.jacobian(physical, x).flatten()
        torch.testing.assert_close(torch.tensor(said["y"]), physical(x).detach().float(), rtol=1e-6, atol=1e-6)
    finally:
        surrogate.float()
    torch.testing.assert_close(torch.tensor(said["dy_dx"]).double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.tensor(said["finite_differences"]).double(), wanted, rtol=1e-5, atol=1e-5)
    refused = shell("build/jacobian model.ts 290.0 0.5", user)
    assert (refused.returncode, "2 numbers were given" in refused.stderr) == (2, True)


class Saving(L.Callback):
    """Saves in the middle of the training, when the average differs from the model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def test_lightnings_averaged_weights(user: Path, surrogate: Any) -> None:
    """As its callback saves them, in a plain checkpoint of a script."""
    module = sys.modules["model"]
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[EMAWeightAveraging(decay=0.5), Saving(user / "averaged.ckpt")],
    )
    trainer.fit(module.Surrogate(), module.Data())
    torch.save(torch.randn(4, 3), user / "sample.pt")
    words = "export averaged.ckpt --to torchscript --ema --model model:Surrogate --sample sample.pt"
    assert main(words.split(), environ={}, cwd=user) == 0
    state = read_file(user / "averaged.ckpt")
    model = JIT.load(str(user / "averaged.ts"))
    weights = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    assert all(torch.equal(weights[name], value) for name, value in state["state_dict"].items())
    assert not torch.equal(weights["net.0.weight"], state["current_model_state"]["net.0.weight"])
