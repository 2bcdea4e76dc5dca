"""A backend on every axis, added to a copy of the packages: one new file and one entry point each, nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


HEAD = '''
"""Added by a test."""
from typing import Literal

from fairlead import {base}ConfigBase, {base}Plugin, hookimpl
from fairlead.interfaces import Claim, Devices, Setting, Topology


class Nova{base}Config({base}ConfigBase):
    """Nova."""

    name: Literal["nova"] = "nova"


class Nova({base}Plugin):
    """Nova."""

    config = Nova{base}Config
    runtime = "{module}:build"
    extra = "lightning"
'''
BODIES = {
    "accelerator": """
    @hookimpl
    def fairlead_devices(self, environ):
        return Devices(1, "nova's own probe", unlimited=True)

def build(config, context):
    from lightning.pytorch.accelerators import CPUAccelerator

    return CPUAccelerator()
""",
    "strategy": """
def build(config, context):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    return SingleDeviceStrategy("cpu")
""",
    "precision": """
def build(config, context):
    from lightning.pytorch.plugins import Precision

    return Precision()
""",
    "environment": """
    @hookimpl
    def fairlead_detect(self, environ):
        return Claim("NOVA_RANK") if "NOVA_RANK" in environ else None

    @hookimpl
    def fairlead_topology(self, config, environ):
        one, first = Setting(1, "NOVA_RANK"), Setting(0, "NOVA_RANK")
        return Topology(
            launched=True, num_nodes=one, local_world_size=one, world_size=one, node_rank=first, local_rank=first,
            global_rank=first, main_address=Setting("127.0.0.1", "NOVA_RANK"),
        )

def build(config, context):
    from lightning.fabric.plugins.environments import LightningEnvironment

    return LightningEnvironment()
""",
    "checkpoint_io": """
def build(config, context):
    from lightning.fabric.plugins import TorchCheckpointIO

    return TorchCheckpointIO()
""",
    "layer_sync": """
def build(config, context):
    from lightning.pytorch.plugins import LayerSync

    class NovaSync(LayerSync):
        def apply(self, model):
            return model

        def revert(self, model):
            return model

    return NovaSync()
""",
    "requeue": """
from fairlead import Requeuer

class NovaRequeuer(Requeuer):
    def requeue(self):
        return "nova was asked"

build = NovaRequeuer.build
""",
    "logger": """
def build(config, context):
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(save_dir=str(context.run_dir), name="nova")
""",
}
BASES = {
    "accelerator": ("lightning", "fairlead_lightning.accelerators.nova", "Accelerator"),
    "strategy": ("strategies", "fairlead_strategies.nova", "Strategy"),
    "precision": ("precision", "fairlead_precision.nova", "Precision"),
    "environment": ("environments", "fairlead_environments.nova", "Environment"),
    "checkpoint_io": ("checkpoint-io", "fairlead_checkpoint_io.nova", "CheckpointIO"),
    "layer_sync": ("strategies", "fairlead_strategies.nova_sync", "LayerSync"),
    "requeue": ("hpc-signals", "fairlead_hpc_signals.nova", "Requeue"),
    "logger": ("lightning", "fairlead_lightning.loggers.nova", "Logger"),
}
JOB = {
    "run": {"name": "nova", "seed": 1},
    "model": {"class": "net:Net"},
    "trainer": {
        **{axis: "nova" for axis in BASES if axis != "logger"},
        "loggers": ["nova"],
        "devices": 1,
        "max_steps": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
    },
}
NET = """
import lightning.pytorch as L
import torch

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


class Copy:
    """The packages with eight more backends, and an interpreter that sees only these."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packages = folder, folder / "packages"
        for project in ROOT.glob("packages/*/pyproject.toml"):
            target = self.packages / project.parent.name
            shutil.copytree(project.parent / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(project, target)
        for axis, (package, module, base) in BASES.items():
            file = self.packages / package / "src" / (module.replace(".", "/") + ".py")
            assert not file.exists()
            source = HEAD.format(base=base, module=module) + BODIES[axis] + "\n\nnova = Nova()\n"
            file.write_text(source.lstrip("\n"))
            project = self.packages / package / "pyproject.toml"
            group = "[project.entry-points.fairlead]\n"
            text = project.read_text()
            assert group in text
            project.write_text(text.replace(group, f'{group}"{axis}.nova" = "{module}:nova"\n'))
        for project in self.packages.glob("*/pyproject.toml"):
            self._install(tomllib.loads(project.read_text())["project"])
        sources = [str(path) for path in sorted(self.packages.glob("*/src"))]
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), *sources])}

    def _install(self, project: dict[str, Any]) -> None:
        """What an installer leaves of a package: its metadata."""
        name, version = project["name"], project["version"]
        info = self.folder / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        requires = [f"Requires-Dist: {line}" for line in project.get("dependencies", [])]
        metadata = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *requires, ""]
        (info / "METADATA").write_text("\n".join(metadata))
        points = project.get("entry-points", {}).get("fairlead", {})
        lines = ["[fairlead]", *(f"{key} = {value}" for key, value in points.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`python WORDS` with the copy in place of what is installed."""
        return subprocess.run(
            [sys.executable, "-P", *words], cwd=cwd or self.folder, env=self.environ, capture_output=True, text=True
        )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_each_is_found_and_available(copy: Copy) -> None:
    done = copy.run("-m", "fairlead", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    found = {f"{one['axis']}.{one['name']}": one for one in json.loads(done.stdout)}
    for axis in BASES:
        assert found[f"{axis}.nova"]["available"], found[f"{axis}.nova"]
    schema = copy.run("-m", "fairlead", "schema")
    assert schema.stdout.count('"nova"') >= len(BASES)


def test_a_job_of_them_all_is_checked_explained_and_trained(copy: Copy) -> None:
    (copy.folder / "net.py").write_text(NET)
    (copy.folder / "job.yaml").write_text(json.dumps(JOB))
    checked = copy.run("-m", "fairlead", "check", "job.yaml", "--json")
    assert json.loads(checked.stdout)["ok"], checked.stdout + checked.stderr
    explained = json.loads(copy.run("-m", "fairlead", "explain", "job.yaml", "--json").stdout)["settings"]
    for axis in BASES:
        shown = explained["loggers" if axis == "logger" else axis]["value"]
        assert shown in ("nova", ["nova"]), (axis, shown)
    copy.environ["NOVA_RANK"] = "0"
    trained = copy.run("-m", "fairlead", "fit", "job.yaml")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (copy.folder / "runs" / "nova" / "checkpoints" / "step-00000002" / "state.ckpt").exists()
    assert list((copy.folder / "runs" / "nova").rglob("nova/*/metrics.csv")), "the added logger has written nothing"


def test_the_missing_package_of_an_added_backend_is_named(copy: Copy) -> None:
    """The list of our own plugins is collected: nobody writes the new ones down."""
    program = (
        "import sys; from pathlib import Path; from fairlead.install import collect\n"
        "found = collect(Path(sys.argv[1])); print({key: found[key] for key in found if key.endswith('.nova')})"
    )
    done = copy.run("-c", program, str(copy.packages))
    assert done.stdout.strip() == str({f"{axis}.nova": "lightning" for axis in sorted(BASES)}), done.stderr
