"""A job without data to train on is refused, and none that may have some."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fairlead.jobs import load_job
from fairlead.own_checks import check_training_data
from fairlead.plugins import PluginManager

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="what Lightning has is known")

HEAD = "import lightning as L\nfrom lightning.pytorch import LightningModule\n"
BARE = "class Net(L.LightningModule):\n    def training_step(self, batch, index): ...\n"
OWN = "    def train_dataloader(self): ...\n"
DATA = "class Data(L.LightningDataModule):\n"


def codes(tmp_path: Path, text: str, data: str = "") -> list[tuple[str, str | None]]:
    (tmp_path / "net.py").write_text(HEAD + text)
    (tmp_path / "job.yaml").write_text(f"model: {{class: net:Net}}\n{data}")
    loaded = load_job("job.yaml", plugins=PluginManager([]), cwd=tmp_path, environ={})
    unused: object = None
    result = check_training_data(loaded, unused, {}, tmp_path)  # type: ignore[arg-type]
    return [(one.code, one.fix) for one in result.findings]


@pytest.mark.parametrize(
    ("text", "data", "fix"),
    [
        (BARE, "", "add the class"),
        (f"{BARE}    def val_dataloader(self): ...\n    def train_dataloaders(self): ...\n", "", "did you mean train_"),
        ("class Base(LightningModule): ...\nclass Net(Base): ...\n", "", "add the class"),
        (f"{BARE}{DATA}    def setup(self, stage): ...\n", "data: {class: net:Data}", "define train_dataloader()"),
        (f"{BARE}{DATA}{OWN}", "", "add the class"),  # there is a data module, and the job does not name it
    ],
)
def test_nothing_to_train_on(tmp_path: Path, text: str, data: str, fix: str) -> None:
    ((code, said),) = codes(tmp_path, text, data)
    assert code == "data-missing"
    assert str(said).startswith(fix)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (BARE + OWN, ""),
        (f"class Base(LightningModule):\n{OWN}class Net(Base): ...\n", ""),
        (f"class Loads:\n{OWN}class Net(Loads, LightningModule): ...\n", ""),
        (f"{BARE}    def __init__(self):\n        self.train_dataloader = make()\n", ""),
        (f"{BARE}Net.train_dataloader = lambda self: ...\n", ""),
        (f"{BARE}setattr(Net, NAME, make)\n", ""),
        ("def Net(): ...\n", ""),
        ("class Net(made()): ...\n", ""),
        (f"{BARE}{DATA}{OWN}", "data: {class: net:Data}"),
        ("from lightning.pytorch.demos.boring_classes import BoringModel\nclass Net(BoringModel): ...\n", ""),
    ],
)
def test_what_may_have_data_is_not_refused(tmp_path: Path, text: str, data: str) -> None:
    assert codes(tmp_path, text, data) == []
