"""`fairlead checkpoint ls` and `verify`: what a person on a login node is told of a run's checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import Command, flip, saved

from fairlead import PluginManager
from fairlead.install import install_line
from fairlead_checkpoint_io.commands.sources import size_text
from fairlead_runs.commit import Checkpoint, FileHash, keep_forever, stage
from fairlead_runs.commit.manifest import Manifest


def measured(root: Path, step: int, loss: float, **metadata: Any) -> Checkpoint:
    return saved(root, step, metrics={"val/loss": loss}, monitor="val/loss", mode="min", **metadata)


def cells(out: str, name: str) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.startswith(name))


# -- ls


def test_ls_shows_which_checkpoint_is_what(fairlead: Command, root: Path) -> None:
    measured(root, 10, 0.5)
    measured(root, 20, 0.25)
    keep_forever(measured(root, 30, 0.75))
    measured(root, 40, 1.0, epoch=3)
    said = fairlead("ls", "runs/gpt")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0].split() == [
        "checkpoint",
        "step",
        "epoch",
        "metric",
        "size",
        "ranks",
        "kept",
        "as",
        "state",
    ]
    assert cells(said.out, "step-00000010")[7:] == ["complete"]
    assert cells(said.out, "step-00000020")[7:] == ["best", "complete"]
    assert cells(said.out, "step-00000030")[7:] == ["forever", "complete"]
    row = ["step-00000040", "40", "3", "val/loss=1", "17", "B", "2", "last", "complete"]
    assert cells(said.out, "step-00000040") == row


def test_a_later_start_that_went_back_is_the_last_one(fairlead: Command, root: Path) -> None:
    measured(root, 40, 0.5)
    measured(root, 20, 0.5, start=2)
    rows = fairlead("ls", root, "--json").document["checkpoints"]
    assert [(row["name"], row["labels"]) for row in rows] == [
        ("step-00000040", ["best"]),
        ("step-00000020", ["last"]),
    ]


def test_ls_says_what_is_damaged_and_what_is_unfinished(fairlead: Command, root: Path) -> None:
    for step in (10, 20, 30, 40):
        measured(root, step, 1 / step)
    (root / "step-00000020" / "rank-00001.pt").unlink()
    (root / "step-00000030" / "state.ckpt").write_bytes(b"sta")
    (root / "step-00000040" / "manifest.json").write_bytes(b'{"format": 1,')
    (root / "step-00000050").mkdir()
    stage(root, "step-00000060", token="s2")
    shutil.copytree(root / "step-00000010", root / ".trash-step-00000001.ab")
    said = fairlead("ls", "runs/gpt")
    assert said.code == 0
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    assert lines["step-00000010"].endswith("last, best  complete")
    assert "DAMAGED: rank-00001.pt: missing" in lines["step-00000020"]
    assert "DAMAGED: state.ckpt: 3 bytes, should be 5" in lines["step-00000030"]
    assert "DAMAGED: the manifest is not JSON: it was cut off or overwritten" in lines["step-00000040"]
    assert "DAMAGED: it has no manifest: it was not written to its end" in lines["step-00000050"]
    assert "unfinished: being written" in lines[".stage-step-00000060.s2:"]
    assert "half deleted" in lines[".trash-step-00000001.ab:"]


def test_ls_tells_of_a_latest_that_leads_nowhere(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    (root / "latest").write_text("step-00000099\n")
    assert "latest: names step-00000099, which is not there" in fairlead("ls", root).out


def test_ls_takes_a_run_its_folder_and_one_checkpoint(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    saved(root, 20)
    run = root.parent
    same = [fairlead("ls", path).out for path in (run, root, "gpt", f"{run}/", f"file://{run}")]
    assert len(set(same)) == 1
    one = fairlead("ls", root / "step-00000010", "--json").document["checkpoints"]
    assert [row["name"] for row in one] == ["step-00000010"]


def test_ls_of_a_run_that_has_saved_nothing(fairlead: Command, root: Path) -> None:
    root.mkdir(parents=True)
    said = fairlead("ls", root)
    assert (said.code, said.out) == (0, f"no checkpoints in {root}\n")
    assert fairlead("ls", root, "--json").document["checkpoints"] == []


def test_plain_lightning_files_are_listed_too(fairlead: Command, tmp_path: Path) -> None:
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "epoch=1-step=9.ckpt").write_bytes(b"PK12")
    line = fairlead("ls", folder.parent).out.splitlines()[1]
    assert line.split() == ["epoch=1-step=9.ckpt", "-", "-", "-", "4", "B", "-", "plain", "Lightning", "not", "checked"]


def test_a_name_that_is_nearly_right(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    for words in (("ls", "runs/gtp"), ("verify", "runs/gpt/checkpoints/step-00000100"), ("ls", "runs/gpt/chekpoints")):
        said = fairlead(*words)
        assert (said.code, said.out) == (2, "")
        assert "did you mean" in said.err


def test_a_wrong_call(fairlead: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    calls = [
        (),
        ("lst",),
        ("ls", "a", "b"),
        ("ls", "s3://bucket/run"),
        ("verify", "file"),
        ("verify", "--threads", "0"),
    ]
    for words in (*calls, ("verify",), ("convert", "a", "b"), ("convert", "a", "b", "--to", "onnx")):
        said = fairlead(*words)
        assert (said.code, said.out) == (2, ""), words
        assert said.err.startswith("error: "), words


@pytest.mark.full
def test_ten_thousand_checkpoints(fairlead: Command, root: Path) -> None:
    """A folder of this size is listed with one look at each checkpoint."""
    root.mkdir(parents=True)
    sums = {"state.ckpt": FileHash("crc32", f"{zlib.crc32(b'x'):08x}", 1)}
    for step in range(10_000):
        folder = root / f"step-{step:08d}"
        folder.mkdir()
        (folder / "state.ckpt").write_bytes(b"x")
        known = {"step": step, "metrics": {"val/loss": abs(step - 5000)}, "monitor": "val/loss", "start": 1}
        (folder / "manifest.json").write_bytes(Manifest.now(sums, known).dump())
    rows = fairlead("ls", root, "--json").document["checkpoints"]
    assert [row["step"] for row in rows] == list(range(10_000))
    assert {row["name"]: row["labels"] for row in rows if row["labels"]} == {
        "step-00005000": ["best"],
        "step-00009999": ["last"],
    }


# -- verify


def test_verify_finds_what_sizes_do_not_show(fairlead: Command, root: Path) -> None:
    """A flipped bit, a truncated file and a missing one, each named; nothing else is blamed."""
    for step in (10, 20, 30, 40):
        saved(root, step)
    flip(root / "step-00000020" / "state.ckpt")
    (root / "step-00000030" / "rank-00001.pt").unlink()
    (root / "step-00000030" / "rank-00000.pt").write_bytes(b"ra")
    said = fairlead("verify", "runs/gpt", "--json")
    assert said.code == 1
    found = {Path(one["path"]).name: one["damage"] for one in said.document["checkpoints"]}
    assert not said.document["ok"]
    assert found == {
        "step-00000010": [],
        "step-00000020": [{"file": "state.ckpt", "problem": found["step-00000020"][0]["problem"]}],
        "step-00000030": [
            {"file": "rank-00000.pt", "problem": "2 bytes, should be 4"},
            {"file": "rank-00001.pt", "problem": "missing"},
        ],
        "step-00000040": [],
    }
    assert "checksum is wrong" in found["step-00000020"][0]["problem"]
    text = fairlead("verify", "runs/gpt")
    assert text.code == 1
    assert "step-00000010: ok (3 files, 17 B)" in text.out
    assert "step-00000030: DAMAGED" in text.out


def test_verify_of_sound_checkpoints(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    saved(root, 20)
    flip(root / "step-00000010" / "state.ckpt")
    assert fairlead("verify", "runs/gpt", "--newest").code == 0
    assert fairlead("verify", root / "step-00000020").code == 0
    assert fairlead("verify", "runs/gpt").code == 1
    said = fairlead("verify", root / "step-00000020", "--newest")
    assert (said.code, "--newest is about a run" in said.err) == (2, True)


def test_newest_is_the_newest_also_when_it_is_damaged(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    saved(root, 20)
    flip(root / "step-00000020" / "state.ckpt")
    assert fairlead("verify", root, "--newest").code == 1


def test_verify_of_a_changed_manifest_and_of_none(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    saved(root, 20)
    flip(root / "step-00000010" / "manifest.json", at=40)
    (root / "step-00000020" / "manifest.json").unlink()
    said = fairlead("verify", root)
    assert said.code == 1
    assert said.out.count("DAMAGED") == 2
    assert fairlead("verify", root / "step-00000020").code == 1


def test_verify_of_nothing_is_no_success(fairlead: Command, root: Path) -> None:
    root.mkdir(parents=True)
    said = fairlead("verify", root)
    assert (said.code, "no checkpoints to verify" in said.err) == (2, True)


def test_an_unreadable_file_is_damage_and_not_the_end(fairlead: Command, root: Path) -> None:
    saved(root, 10)
    path = root / "step-00000010" / "state.ckpt"
    path.unlink()
    path.symlink_to(path)  # no permission bit stops root
    said = fairlead("verify", root)
    assert (said.code, "state.ckpt: cannot be read: Too many levels of symbolic links" in said.out) == (1, True)


def test_sizes_are_said_for_people() -> None:
    assert [size_text(n) for n in (None, 0, 1023, 1024, 5 << 40, 5 << 50)] == [
        *("-", "0 B", "1023 B", "1.0 KiB", "5.0 TiB", "5120.0 TiB")
    ]


def test_ls_and_verify_import_no_torch(root: Path, tmp_path: Path) -> None:
    """On a login node with `fairlead[check]` there is none."""
    saved(root, 10)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['lightning'] = sys.modules['numpy'] = None\n"
        "from fairlead.cli import main\n"
        "codes = [main(['checkpoint', *words, 'runs/gpt']) for words in (['ls'], ['verify'], ['ls', '--json'])]\n"
        "sys.exit(codes != [0, 0, 0])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step-00000010: ok" in done.stdout


def test_the_others_name_the_pip_line_where_torch_is_missing(
    fairlead: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 10)
    monkeypatch.setattr(PluginManager, "is_installed", lambda self, requirement: False)
    target = root.parent / "x"
    calls = [("diff", root, root), ("convert", root, target, "--to", "torch"), ("consolidate", root)]
    for words in (*calls, ("export", root, "-o", target)):
        said = fairlead(*words)
        assert said.code == 2
        assert install_line("lightning") in said.err
    assert os.listdir(root.parent) == ["checkpoints"]


def test_json_is_one_document(fairlead: Command, root: Path) -> None:
    saved(root, 10, metrics={"val/loss": float("nan")})
    for words in (("ls", root), ("verify", root)):
        json.loads(fairlead(*words, "--json").out)
