"""`fairlead checkpoint` with URLs: what a person is told of a run on an object store, from a machine without it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Command, saved

from fairlead.install import install_line
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs.commit import Checkpoint, keep_forever
from fairlead_runs.remote import Store, upload


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/gpt"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def copied(url: str, *checkpoints: Checkpoint) -> Store:
    store = Store.open(url)
    for checkpoint in checkpoints:
        upload(checkpoint.path, store)
    return store


def measured(root: Path, step: int, loss: float) -> Checkpoint:
    return saved(root, step, metrics={"val/loss": loss}, monitor="val/loss", mode="min")


def state(root: Path, step: int, value: float) -> Checkpoint:
    """One with a state that can be loaded."""
    file = root.parent / "state"
    weights = {"state_dict": {"w": torch.full((3,), value)}, "global_step": step, "epoch": 0}
    TorchFileCheckpointIO(TorchCheckpointIOConfig()).save_checkpoint(weights, file)
    return saved(root, step, ranks=0, state=file.read_bytes())


def test_ls_shows_what_it_shows_of_the_run_directory_and_reads_manifests_only(
    fairlead: Command, root: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [measured(root, 10, 0.5), measured(root, 20, 0.25), measured(root, 30, 0.75)]
    keep_forever(made[0])
    copied(url, *made)
    read: list[str] = []
    content = Store.read

    def noted(store: Store, name: str) -> bytes | None:
        read.append(name)
        return content(store, name)

    monkeypatch.setattr(Store, "read", noted)
    monkeypatch.delattr(Store, "get")
    monkeypatch.delattr(Store, "chunks")
    here, there = fairlead("ls", root), fairlead("ls", url)
    assert (there.code, there.out, there.err) == (0, here.out, "")
    assert set(read) == {"latest", *(f"step-000000{step}/manifest.json" for step in (10, 20, 30))}
    documents = [fairlead("ls", place, "--json").out for place in (root, url)]
    assert documents[1] == documents[0].replace(str(root), url)
    assert fairlead("ls", f"{url}/step-00000020").out == fairlead("ls", root / "step-00000020").out


def test_ls_says_what_is_damaged_and_what_is_unfinished(fairlead: Command, root: Path, url: str) -> None:
    store = copied(url, *(saved(root, step) for step in (10, 20, 30, 40)))
    store.write("step-00000010/manifest.json", b"{")
    store.delete(["step-00000020/rank-00001.pt"])
    store.write("step-00000030/state.ckpt", b"short!!")
    store.delete(["step-00000040/manifest.json"])
    said = fairlead("ls", url)
    assert said.code == 0
    assert "DAMAGED: rank-00001.pt: missing" in said.out
    assert "DAMAGED: state.ckpt: 7 bytes, should be 5" in said.out
    assert [line.split()[0] for line in said.out.splitlines()[1:4]] == [f"step-000000{step}" for step in (10, 20, 30)]
    assert said.out.splitlines()[4:] == [
        "step-00000040: unfinished: being uploaded, or left by a killed start",
        "latest: names step-00000040, which is not there",
    ]
    document = fairlead("ls", url, "--json").document
    assert [item["name"] for item in document["unfinished"]] == ["step-00000040", "latest"]
    assert [row["complete"] for row in document["checkpoints"]] == [False, False, False]


def test_verify_reads_every_byte_on_the_store(fairlead: Command, root: Path, url: str) -> None:
    store = copied(url, *(saved(root, step) for step in (10, 20)))
    said = fairlead("verify", url)
    assert (said.code, said.out) == (0, fairlead("verify", root).out)
    store.write("step-00000010/state.ckpt", b"stare")
    said = fairlead("verify", url)
    assert said.code == 1
    assert said.out.splitlines()[0].startswith("step-00000010: DAMAGED (3 files")
    assert "state.ckpt: its" in said.out.splitlines()[1]
    assert "checksum is wrong" in said.out.splitlines()[1]
    assert fairlead("verify", url, "--newest").out == fairlead("verify", f"{url}/step-00000020").out
    assert fairlead("verify", url, "--newest").code == 0
    document = fairlead("verify", f"{url}/step-00000010", "--json").document
    assert [(one["path"], one["ok"]) for one in document["checkpoints"]] == [(f"{url}/step-00000010", False)]
    store.delete(["step-00000020/manifest.json", "step-00000010/manifest.json"])
    assert fairlead("verify", f"{url}/step-00000020").out.splitlines() == [
        "step-00000020: DAMAGED (0 files, 0 B)",
        "  manifest.json: missing: it was not uploaded to its end",
    ]
    said = fairlead("verify", url)
    assert (said.code, said.out) == (2, "")
    assert "not uploaded to their end: step-00000010, step-00000020" in said.err


def test_a_checkpoint_that_is_being_uploaded_is_no_damage_of_the_run(fairlead: Command, root: Path, url: str) -> None:
    store = copied(url, saved(root, 10))
    store.write("step-00000020/state.ckpt", b"half")
    said = fairlead("verify", url)
    assert said.code == 0
    assert said.err == "step-00000020: not uploaded to its end, so it is no checkpoint; nothing was compared\n"


def test_a_wrong_url_says_what_is_there(fairlead: Command, root: Path, url: str) -> None:
    copied(url, saved(root, 10))
    above, name = url.rpartition("/")[0], f"{url}/step-00000099"
    wrong = {
        f"{url}s": "nothing is stored there",
        above: "below it are: gpt",
        name: "there are: step-00000010",
        "s4://bucket/gpt": "fsspec knows no protocol 's4'",
        "s3://me:hidden@bucket/gpt": "holds a user or a password",
    }
    for place, expected in wrong.items():
        for action in ("ls", "verify"):
            said = fairlead(action, place)
            assert (said.code, said.out) == (2, ""), place
            assert expected in said.err
            assert "hidden" not in said.err
    for action in ("diff", "convert", "consolidate", "export"):
        places = {"diff": (url,), "convert": ("x", "--to", "torch"), "export": ("-o", "x")}.get(action, ())
        said = fairlead(action, name, *places)
        assert (said.code, "there are: step-00000010" in said.err) == (2, True), said.err


def test_without_fsspec_the_pip_line_is_named(fairlead: Command, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "fsspec" else find(name, *more)
    )
    for action in ("ls", "verify", "consolidate"):
        said = fairlead(action, url)
        assert (said.code, said.out) == (2, "")
        assert install_line("remote") in said.err


def test_what_must_have_files_gets_a_copy_that_is_deleted(
    fairlead: Command, root: Path, url: str, tmp_path: Path, temporary: Path
) -> None:
    one, two = state(root, 10, 1.0), state(root, 20, 2.0)
    store = copied(url, one, two)
    said = fairlead("diff", f"{url}/step-00000010", one.path)
    assert said.code == 0, said.err
    assert said.err.startswith(f"downloading {url}/step-00000010 (")
    assert "which is deleted at the end" in said.err
    document = fairlead("diff", f"{url}/step-00000010", f"{url}/step-00000020", "--json").document
    assert (document["a"], document["b"]) == (f"{url}/step-00000010", f"{url}/step-00000020")
    assert "state_dict.w" in [item["name"] for item in document["differences"]]
    said = fairlead("consolidate", url)  # of a run, the newest
    assert said.code == 0, said.err
    assert said.out.startswith(f"{tmp_path / 'gpt-step-00000020.ckpt'}: torch, ")
    assert f"from {url}/step-00000020 (torch)" in said.out
    assert fairlead("diff", "gpt-step-00000020.ckpt", two.path).code == 0
    assert fairlead("convert", url, "w.safetensors", "--to", "safetensors").code == 0
    said = fairlead("convert", url, "w.safetensors", "--to", "safetensors")
    assert (said.code, "downloading" in said.err) == (2, False)  # refused before the download
    said = fairlead("export", url, "-o", "model")
    assert (said.code, f"{url}/step-00000020" in said.err.partition("\n")[2]) == (2, True)
    assert "carries no job" in said.err
    store.write("step-00000020/state.ckpt", b"x" * store.list()["step-00000020/state.ckpt"].size)
    said = fairlead("consolidate", f"{url}/step-00000020", "--overwrite")
    assert (said.code, "checksum is wrong" in said.err) == (2, True)
    assert list(temporary.iterdir()) == []


def test_ls_and_verify_of_a_url_import_no_torch(root: Path, tmp_path: Path) -> None:
    """`file://` is the same folder, by either name."""
    place = f"file://{tmp_path}/store/gpt"
    store = copied(place, saved(root, 10))
    store.write("fingerprint.json", b"{}")  # as the backend `remote` leaves there
    script = (
        "import sys; sys.modules['torch'] = sys.modules['lightning'] = None\n"
        "from fairlead.cli import main\n"
        "from fairlead_runs.remote import Store, upload\n"
        "from pathlib import Path\n"
        "upload(Path('runs/gpt/checkpoints/step-00000010'), Store.open('memory://gpt'))\n"
        f"places = ['memory://gpt', {place!r}, 'store/gpt']\n"
        "codes = [main(['checkpoint', action, place]) for action in ('ls', 'verify') for place in places]\n"
        "sys.exit(codes != [0] * 6)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step-00000010: ok") == 3
    assert done.stdout.count("complete") == 3


def test_who_reads_a_directory_that_serves_as_store_finds_the_old_object_or_the_new_one(tmp_path: Path) -> None:
    """As on a store: a start elsewhere reads the fingerprint or `latest`, or replaces it, while this one does."""
    store, file = Store.open(f"file://{tmp_path}/store/gpt"), tmp_path / "store" / "gpt" / "latest"
    versions = [b"a" * (1 << 20), b"b" * (1 << 20)]
    store.write("latest", versions[0])
    seen: set[bytes] = set()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.add(file.read_bytes())

    def write(first: int) -> None:
        for number in range(50):
            store.write("latest", versions[(first + number) % 2])

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(2) as writers:
        written = [writers.submit(write, first) for first in (0, 1)]
    ended.set()
    reader.join()
    assert [one.exception() for one in written] == [None, None]
    assert seen <= set(versions)
    assert list(file.parent.iterdir()) == [file]
