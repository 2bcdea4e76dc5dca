"""What a run writes down: history, heartbeats, provenance; and what it never does: secrets."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.errors import RunDirectoryError
from fairlead.interfaces import Job
from fairlead_runs import (
    Beat,
    Heartbeat,
    History,
    code_change,
    collect_provenance,
    git_state,
    heartbeat_path,
    is_secret_name,
    read_heartbeats,
    read_history,
    redact,
    redact_argv,
    redact_text,
)
from fairlead_runs.commit import Syscalls
from fairlead_runs.heartbeat import RECORD_BYTES


def test_events_are_lines_of_json_with_time_rank_host_and_pid(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl", rank=3)
    history.append("start", start=1, loss=float("nan"), path=Path("/x"), nested={"a": (1, None, True)})
    history.append("checkpoint", durable=False, step=5, api_key="hunter2")
    first, second = (json.loads(line) for line in history.path.read_text().splitlines())
    assert first["event"] == "start"
    assert first["time"].endswith("+00:00")
    assert (first["rank"], first["pid"], first["host"]) == (3, os.getpid(), os.uname().nodename)
    assert (first["loss"], first["path"], first["nested"]) == ("nan", "/x", {"a": [1, None, True]})
    assert (second["step"], second["api_key"]) == (5, "<redacted>")
    assert [event["event"] for event in history.read()] == ["start", "checkpoint"]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_next_event(tmp_path: Path, cut: int) -> None:
    history = History(tmp_path / "history.jsonl")
    for name in ("one", "two"):
        history.append(name)
    os.truncate(history.path, history.path.stat().st_size - cut)
    assert [event["event"] for event in history.read()][:1] == ["one"]
    history.append("three")
    history.append("four")
    assert [event["event"] for event in history.read() if event["event"] != "two"] == ["one", "three", "four"]


def test_an_event_is_one_write_and_durable_ones_are_synced(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watch(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            calls.append("write")
            return super().write(fd, data)

        def fsync(self, fd: int) -> None:
            calls.append("fsync")
            super().fsync(fd)

    history = History(tmp_path / "history.jsonl", syscalls=Watch())
    history.append("stop")
    history.append("progress", durable=False)
    assert calls == ["write", "fsync", "write"]


def test_a_history_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    class Full(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunDirectoryError, match="free some space"):
        History(tmp_path / "history.jsonl", syscalls=Full()).append("stop")
    assert read_history(tmp_path / "none.jsonl") == []


def test_heartbeats_of_many_ranks_share_a_file_per_node(tmp_path: Path) -> None:
    for node in (1, 0):
        for local in (3, 0, 2):  # rank 1 of each node has not begun yet
            beat = Heartbeat(heartbeat_path(tmp_path, node), local, node * 4 + local)
            beat.beat("validate: epoch 1", 100 + local)
            beat.close()
    assert sorted(os.listdir(tmp_path)) == ["node-00000.txt", "node-00001.txt"]
    beats = read_heartbeats(tmp_path)
    assert [(b.rank, b.node, b.local_rank, b.step) for b in beats] == [
        (0, 0, 0, 100), (2, 0, 2, 102), (3, 0, 3, 103), (4, 1, 0, 100), (6, 1, 2, 102), (7, 1, 3, 103)
    ]  # fmt: skip
    assert {b.phase for b in beats} == {"validate:_epoch_1"}
    assert abs(beats[0].time - time.time()) < 3600


def test_torn_records_and_junk_are_left_out(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 0)
    for rank in range(3):
        Heartbeat(path, rank, rank).beat("train", 5)
    data = bytearray(path.read_bytes())
    assert len(data) == 3 * RECORD_BYTES
    data[RECORD_BYTES + 2] ^= 1
    path.write_bytes(data[:-1])
    (tmp_path / "node-x.txt").write_text("junk")
    (tmp_path / "node-00007.txt").write_text("junk")
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0]
    assert read_heartbeats(tmp_path / "none") == []


def test_beats_are_written_at_most_once_a_second_and_at_every_change_of_phase(tmp_path: Path) -> None:
    clock = [0.0]
    beat = Heartbeat(
        heartbeat_path(tmp_path, 0), 0, 0, interval_s=100, clock=lambda: clock[0], now=lambda: 1000 + clock[0]
    )
    seen = []
    for at, phase, step in [(0, "train", 1), (50, "train", 2), (60, "validate", 2), (70, "validate", 2),
                            (170, "validate", 3)]:  # fmt: skip
        clock[0] = at
        beat.beat(phase, step)
        (last,) = read_heartbeats(tmp_path)
        seen.append((last.phase, last.step, last.time))
    assert seen == [
        ("train", 1, 1000.0),
        ("train", 1, 1000.0),
        ("validate", 2, 1060.0),
        ("validate", 2, 1060.0),
        ("validate", 3, 1170.0),
    ]


def until(found: Callable[[], object]) -> None:
    """Waits for what another thread does."""
    for _ in range(1200):
        if found():
            return
        time.sleep(0.05)
    raise AssertionError("not within a minute")


def test_the_record_of_a_rank_that_stands_still_is_its_last_beat_and_says_where_it_stands(tmp_path: Path) -> None:
    beat = Heartbeat(heartbeat_path(tmp_path, 0), 0, 7, interval_s=0.05, still_s=0.2, start=3, host="n2.example.org")
    for step in range(50):
        beat.beat("train", step)

    def last() -> Beat:
        (found,) = read_heartbeats(tmp_path)
        return found

    until(lambda: last().location)
    assert (last().step, last().phase, last().start, last().host) == (49, "train", 3, "n2")
    assert re.fullmatch(r"\w+@\w+\.py:\d+", last().location)
    beat.beat("train", 50)
    until(lambda: last().step == 50 and not last().location)
    beat.close()


def test_a_closed_heartbeat_holds_nothing(tmp_path: Path) -> None:
    """Its thread would free a process group while the interpreter ends, and torch would abort the process."""

    class Model:
        pass

    before, model = set(threading.enumerate()), Model()
    known = weakref.ref(model)
    beat = Heartbeat(heartbeat_path(tmp_path, 0), 0, 0, interval_s=0.01, still_s=0.01)
    stood = threading.Event()

    def still(held: Model = model) -> None:
        stood.set()

    beat.on_still = still
    beat.beat("train", 1)
    assert stood.wait(10)
    del model, still
    assert known() is not None
    beat.close()
    assert known() is None
    assert set(threading.enumerate()) <= before


def test_the_turns_within_a_step_are_counted(tmp_path: Path) -> None:
    """After a validation the phase is the same as before it; the turn tells them apart."""
    beat = Heartbeat(heartbeat_path(tmp_path, 0), 0, 0)
    seen = []
    for phase, step in [("train", 4), ("train", 5), ("validate", 5), ("train", 5), ("save", 5), ("train", 6)]:
        beat.beat(phase, step)
        (last,) = read_heartbeats(tmp_path)
        seen.append((last.step, last.turn))
    beat.close()
    assert seen[2:5] == [(5, 1), (5, 2), (5, 3)]
    assert seen == sorted(seen)


def test_long_words_are_cut(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 0)
    beat = Heartbeat(path, 0, 16383, start=9999, host="an-extraordinarily-long-name-of-a-node.example.org")
    beat.beat("a phase of sixty characters, which nobody would ever use", 10**10)
    beat._write("a_function_with_a_long_name_somewhere@train_script.py:1234")
    beat.close()
    assert len(path.read_bytes()) == RECORD_BYTES
    (long,) = read_heartbeats(tmp_path)
    assert long.location.endswith("@train_script.py:1234")
    assert (long.rank, long.step, long.start, long.host) == (16383, 10**10, 9999, "an-extraordinarily-l")


def test_a_heartbeat_never_stops_a_training(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("a file in the way")
    beat = Heartbeat(heartbeat_path(tmp_path / "heartbeats", 0), 0, 0)
    beat.beat("train", 1)
    assert isinstance(beat.error, OSError)
    full = Heartbeat(Path("/dev/full"), 0, 0) if os.path.exists("/dev/full") else beat
    full.beat("train", 1)
    assert full.error is not None


@pytest.mark.parametrize(
    "name",
    [
        "KEY",
        "API_KEY",
        "apiKey",
        "wandbApiKey",
        "HF-TOKEN",
        "accessToken",
        "SLURM_JWT_TOKEN",
        "db_password",
        "PASSWD",
        "AWS_SECRET_ACCESS_KEY",
        "credentials",
        "http_auth",
        "oauth_token",
        "client.secret",
        "apikey",
        "key2",
    ],
)
def test_names_that_say_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "num_keys",
        "tokenizer",
        "tokens_per_batch",
        "monkey",
        "keyboard",
        "author",
        "authors",
        "keep",
        "max_tokens",
        "pad_token",
        "eosToken",
        "label_key",
        "secretary",
        "passwordless",
        "turkey",
        "hockey",
    ],
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_name(name)


def test_only_texts_are_redacted_at_any_depth() -> None:
    data = {
        "key_dim": 64,
        "use_token": True,
        "token": None,
        "optimizers": [{"name": "adam", "api_key": "x"}],
        "credentials": {"user": "me", "ports": [1, "two"]},
        "url": "https://me:hunter2@example.org/repo.git",
        "other": "hf_abcdefghijklmnopqrstuvwx",
        "pad_token": "<pad>",
    }
    assert redact(data) == {
        "key_dim": 64,
        "use_token": True,
        "token": None,
        "optimizers": [{"name": "adam", "api_key": "<redacted>"}],
        "credentials": {"user": "<redacted>", "ports": [1, "<redacted>"]},
        "url": "https://me:<redacted>@example.org/repo.git",
        "other": "<redacted>",
        "pad_token": "<pad>",
    }


def test_command_lines_are_redacted() -> None:
    argv = ["fit", "job.yaml", "--set", "model.args.api_key=abc", "--set=data.args.token=abc", "--token", "abc"]
    argv += ["--set", "model.args.key_dim=64", "--set", "model.args.tokenizer=bpe", "--password=abc", "--key", "--x"]
    assert redact_argv(argv) == [
        "fit", "job.yaml", "--set", "model.args.api_key=<redacted>", "--set=data.args.token=<redacted>", "--token",
        "<redacted>", "--set", "model.args.key_dim=64", "--set", "model.args.tokenizer=bpe", "--password=<redacted>",
        "--key", "--x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('+API_KEY = "abc def"', '+API_KEY = "<redacted>"'),
        ("+export WANDB_API_KEY=0123456789abcdef", "+export WANDB_API_KEY=<redacted>"),
        ("+  api_key: 'abc'", "+  api_key: '<redacted>'"),
        ('+    "token": "abc",', '+    "token": "<redacted>",'),
        ('+token: str = "abc"', '+token: str = "<redacted>"'),
        ('+os.environ["HF_TOKEN"] = "abc"', '+os.environ["HF_TOKEN"] = "<redacted>"'),
        ('+login(key=f"abc")', '+login(key=f"<redacted>")'),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer <redacted>"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA",
            "-----BEGIN RSA PRIVATE KEY----- <redacted> -----END RSA",
        ),
        ("+token = tokenizer(text1234)", None),
        ("+key = os.environ.get(name2)", None),
        ("+for key, value in items2():", None),
        ('+if key == "loss":', None),
        ('+tokenizer = "bpe"', None),
        ('+api_key = ""', None),
        ("+num_keys=16", None),
    ],
)
def test_diffs_are_redacted_where_they_assign_a_secret(text: str, expected: str | None) -> None:
    assert redact_text(text) == (text if expected is None else expected)


def test_redacting_a_large_text_takes_time_in_proportion() -> None:
    """Neither a minified line nor a line of blanks may send the patterns into a spiral."""
    for line in ("a" * 300_000, "key:" + " " * 300_000, "a.b-c" * 60_000, "token " * 50_000, '"' * 200_000):
        assert redact_text(line) == line


def git(folder: Path, *args: str) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    env = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", *args], cwd=folder, env=env, check=True, capture_output=True)


def test_the_code_is_recorded_with_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-b", "main")
    environ = dict(os.environ)
    empty = git_state(tmp_path, environ)
    assert empty is not None
    assert (empty["commit"], empty["branch"], empty["dirty"]) == (None, "main", False)

    (tmp_path / "train file.py").write_text("lr = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = git_state(tmp_path, environ)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["diff"], clean["untracked"]) == (False, "", [])

    (tmp_path / "train file.py").write_text('lr = 2\nAPI_KEY = "hunter2"\n')
    (tmp_path / "new ü.py").touch()
    dirty = git_state(tmp_path, environ)
    assert dirty is not None
    assert dirty["dirty"]
    assert "+lr = 2" in dirty["diff"]
    assert "hunter2" not in dirty["diff"]
    assert dirty["untracked"] == ["new ü.py"]
    assert code_change(clean, dirty).summary == "uncommitted changes differ: train file.py"
    assert code_change(dirty, dirty).changed is False
    assert code_change(None, dirty).changed is None

    monkeypatch.setattr("fairlead_runs.provenance.MAX_DIFF_BYTES", 20)
    cut = git_state(tmp_path, environ)
    assert cut is not None
    assert cut["diff_cut"]
    assert len(cut["diff"]) == 20
    assert code_change(cut, cut).changed is None


def test_without_git_or_with_a_slow_one_there_is_no_code_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path, {"PATH": str(tmp_path)}) is None
    assert git_state(tmp_path, dict(os.environ)) is None  # not a repository
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("fairlead_runs.provenance.TIMEOUT_S", 0.2)
    assert git_state(tmp_path, {"PATH": f"{tmp_path}:/bin:/usr/bin"}) is None


def test_provenance_keeps_an_allow_list_of_the_environment_and_no_secret(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "4711",
        "SLURM_JWT": "hunter2",
        "SLURM_JWT_KEY": "hunter2",
        "NCCL_DEBUG": "INFO",
        "FAIRLEAD_TOKEN": "hunter2",
        "WANDB_API_KEY": "hunter2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HOME": "/home/me",
        "TORCH_PROXY": "http://me:hunter2@proxy:80",
    }
    job = Job("slurm:4711", variables=("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JWT_KEY"))
    found = collect_provenance(environ, job=job, code=tmp_path, argv=["fit", "--set", "a.token=hunter2"])
    text = json.dumps(found)
    assert "hunter2" not in text
    assert found["environ"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "4711",
        "TORCH_PROXY": "http://me:<redacted>@proxy:80",
    }
    assert found["scheduler_job"] == "slurm:4711"
    assert any(package.startswith("pytest==") for package in found["packages"])
    assert found["hardware"]["cpus"] >= 1
    assert found["hardware"]["gpus"] is None
    assert found["git"] is None


def test_gpus_are_asked_of_nvidia_smi(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 550.1'\n")
    tool.chmod(0o755)
    found = collect_provenance({"PATH": f"{tmp_path}:/bin:/usr/bin"}, code=tmp_path)
    assert found["hardware"]["gpus"] == ["NVIDIA H100, 81559 MiB, 550.1"]
