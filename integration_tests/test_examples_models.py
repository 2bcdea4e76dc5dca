"""The example models and their data, without Fairlead: what a run of them can be trusted to show."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from examples.gpt.callbacks import LossCurve, Sample, draw, read_column
from examples.gpt.data import StdlibBytes, Windows, split_files, stdlib_files
from examples.gpt.model import GPT

# What Lightning 2.6 says of torch 2.13, and of loaders without workers (the text is in memory: they would only cost).
trains = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")


def small(**overrides: float) -> GPT:
    torch.manual_seed(0)
    settings = {"layers": 2, "width": 32, "heads": 2, "context": 32} | overrides
    return GPT(**settings)  # type: ignore[arg-type]  # ints and floats by name


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def data() -> StdlibBytes:
    module = StdlibBytes(context=32, batch_size=4, seed=3)
    module.setup()
    return module


def both(module: StdlibBytes) -> tuple[Windows, Windows]:
    assert module.train_windows is not None
    assert module.val_windows is not None
    return module.train_windows, module.val_windows


def test_a_later_byte_does_not_change_earlier_logits() -> None:
    model = small().eval()
    tokens = random_bytes(1, 32)
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_the_order_of_earlier_bytes_matters() -> None:
    """Without positions, one layer of attention sees a bag of bytes."""
    model = small(layers=1).eval()
    tokens = random_bytes(1, 32)
    swapped = tokens[:, [1, 0, *range(2, 32)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


@pytest.mark.parametrize("width", [32, 128])
def test_an_untrained_model_guesses_uniformly(width: int) -> None:
    with torch.no_grad():
        loss = small(width=width).loss(random_bytes(16, 33))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.full
def test_it_learns_a_tiny_batch_by_heart() -> None:
    model = small(context=16)
    batch = random_bytes(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert model.loss(batch).item() < 0.1


def test_a_width_that_the_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 \\* heads = 6"):
        GPT(width=32, heads=3)


def test_generation_repeats_and_leaves_the_random_state_and_mode_alone() -> None:
    model = small(dropout=0.5).train()
    state = torch.get_rng_state()
    first = model.generate(b"def ", length=40)  # longer than the context
    assert first == model.generate(b"def ", length=40)
    assert first.startswith(b"def ")
    assert len(first) == 44
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def fit(directory: Path, steps: int, **model: float) -> L.Trainer:
    """A few steps with plain Lightning, on one process."""
    trainer = L.Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=2,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=CSVLogger(directory, name="", version=""),
        callbacks=[Sample(length=20), LossCurve()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(small(layers=1, **model), StdlibBytes(context=32, batch_size=4))
    return trainer


@trains
def test_every_matrix_decays_and_no_gain_does_and_the_rate_ends_low(tmp_path: Path) -> None:
    trainer = fit(tmp_path, steps=8, lr=1e-2, warmup_steps=3)
    decayed, kept = trainer.optimizers[0].param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    assert trainer.model is not None
    assert len(decayed["params"]) + len(kept["params"]) == len(list(trainer.model.parameters()))
    assert decayed["lr"] == pytest.approx(1e-3)  # a tenth of the peak


@pytest.mark.full
@trains
def test_a_fit_ends_with_a_sample_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, steps=4)
    out = capsys.readouterr().out
    assert all(char == "\n" or char == "\t" or char.isprintable() for char in out), "nothing that upsets a terminal"
    assert "A sample of 20 bytes" in out
    assert "def " in out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert read_column(tmp_path / "metrics.csv", "train/loss")[0] == [0, 1, 2, 3]
    assert len(read_column(tmp_path / "metrics.csv", "val/loss")[1]) == 2


@pytest.mark.full
def test_without_metrics_or_matplotlib_the_run_ends_well_and_says_why_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = L.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"there is no .*metrics\.csv"):
        LossCurve().on_fit_end(trainer, small())
    (tmp_path / "metrics.csv").write_text("step,epoch,train/loss,val/loss\n0,0,5.5,\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.delitem(sys.modules, "matplotlib.backends.backend_agg", raising=False)
    with pytest.warns(UserWarning, match="pip install matplotlib"):
        LossCurve().on_fit_end(trainer, small())
    assert not (tmp_path / "loss.png").exists()


def test_the_curve_skips_blank_cells_and_metrics_that_were_never_logged(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,epoch,train/loss\n2,0,3.0\n0,0,5.5\n1,0,\n")
    assert read_column(metrics, "train/loss") == ([0, 2], [5.5, 3.0])
    draw(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_only_the_standard_library_is_read(tmp_path: Path) -> None:
    files = stdlib_files()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    for path in ("b.py", "a.py", "package/__init__.py", "site-packages/torch.py", "test/test_os.py", "c/tests/x.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "notes.txt").touch()
    assert stdlib_files(tmp_path) == [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "package/__init__.py"]


def test_no_file_is_in_both_splits() -> None:
    files = stdlib_files()
    train, val = split_files(files, seed=1)
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(files)
    assert (train, val) == split_files(files, seed=1)
    assert val != split_files(files, seed=2)[1]


def test_windows_cover_the_text_once_and_overlap_by_one_byte_only() -> None:
    """The last target of a window is the first input of the next: every byte is predicted once."""
    text = torch.arange(100, dtype=torch.uint8)
    windows = Windows(text, context=16)
    items = [windows[i] for i in range(len(windows))]
    assert len(items) == 6
    targets = torch.cat([item[1:] for item in items])
    assert torch.equal(targets, torch.arange(1, 97))
    assert all(torch.equal(a[-1], b[0]) for a, b in pairwise(items))


def test_training_and_validation_text_are_disjoint(data: StdlibBytes) -> None:
    train, val = both(data)
    seen = {bytes(train[i].tolist()) for i in range(0, len(train), 7)}
    assert len(train) > 10 * len(val) > 1000
    assert train.text.data_ptr() != val.text.data_ptr()
    repeated = sum(bytes(val[i].tolist()) in seen for i in range(len(val)))
    assert repeated / len(val) < 0.01, "windows of 33 bytes, apart from boilerplate, are new"


def test_the_same_seed_gives_the_same_windows(data: StdlibBytes) -> None:
    train, val = both(data)
    again = StdlibBytes(context=32, batch_size=4, seed=3)
    again.setup()
    train_again, val_again = both(again)
    assert all(torch.equal(train[i], train_again[i]) for i in (0, 17, len(train) - 1))
    assert all(torch.equal(val[i], val_again[i]) for i in (0, 17, len(val) - 1))


def test_train_samples_shortens_the_epoch() -> None:
    short = StdlibBytes(context=32, batch_size=4, train_samples=10)
    short.setup()
    assert len(both(short)[0]) == 10
    assert len(short.train_dataloader()) == 2  # the last, incomplete batch is dropped


def test_a_loader_before_setup_is_refused() -> None:
    with pytest.raises(RuntimeError, match="setup"):
        StdlibBytes().train_dataloader()
