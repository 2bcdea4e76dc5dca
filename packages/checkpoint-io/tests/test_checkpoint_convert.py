"""`fairlead checkpoint convert` and `consolidate`: every layout to every other, without a lost bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import Command, flip
from safetensors import safe_open
from safetensors.torch import load_model, save_file

from fairlead_checkpoint_io import DistributedCheckpointIOConfig
from fairlead_checkpoint_io.distributed_shards.runtime import DistributedCheckpointIO
from fairlead_checkpoint_io.files.formats import CONTENTS
from fairlead_runs.commit import publish, stage

RECORDED = Path(__file__).parent / "recorded" / "deepspeed"
TRUST = (
    *("--trust", "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    *("--trust", "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *("--trust", "deepspeed.utils.tensor_fragment.fragment_address"),
)


class Net(torch.nn.Module):
    """Tied weights, buffers, a number of each width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.wide = torch.nn.Linear(4, 4).double()
        self.low = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def lightning_state(*, groups: int = 1, named: bool = False) -> dict[str, Any]:
    """A state as plain Lightning saves it, after a step of training."""
    torch.manual_seed(1)
    net = Net()
    parameters = list(net.named_parameters()) if named else list(net.parameters())
    made = [parameters] if groups == 1 else [parameters[:2], parameters[2:]]
    optimizer = torch.optim.AdamW([{"params": part, "weight_decay": 0.1 * n} for n, part in enumerate(made)], lr=0.01)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict(), torch.optim.SGD(net.parameters(), lr=0.1).state_dict()],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}],
        "hyper_parameters": {"width": 4},
        "loops": {"fit_loop": {"state": {}, "empty": []}},
    }


def same(a: Any, b: Any) -> bool:
    """Equal in every bit and, mappings aside, in every type."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.ckpt"
    torch.save(lightning_state(), path)
    return path


def left(folder: Path) -> set[str]:
    """What is in a folder, hidden remains included."""
    return {path.name for path in folder.iterdir()}


# -- round trips


@pytest.mark.parametrize("named", [False, True])
def test_torch_to_distributed_and_back_loses_no_bit(fairlead: Command, tmp_path: Path, named: bool) -> None:
    """Weights, optimizers and everything else come back as they were."""
    state = lightning_state(groups=2 if named else 1, named=named)
    state["optimizer_states"] = state["optimizer_states"][: 1 if named else 2]
    torch.save(state, tmp_path / "a.ckpt")
    assert fairlead("convert", "a.ckpt", "sharded", "--to", "distributed").code == 0
    assert CONTENTS in left(tmp_path / "sharded")
    assert fairlead("convert", "sharded", "b.ckpt", "--to", "torch").code == 0
    assert same(load(tmp_path / "b.ckpt"), state)
    assert left(tmp_path) == {"a.ckpt", "b.ckpt", "sharded"}
    assert fairlead("diff", "a.ckpt", "sharded").code == 0


def test_a_converted_folder_is_as_lightnings_sharded_strategies_write_it(fairlead: Command, plain: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    fairlead("convert", plain, "sharded", "--to", "distributed")
    stored = FileSystemReader(plain.parent / "sharded").read_metadata().state_dict_metadata
    assert "state_dict.embed.weight" in stored
    assert "optimizer_0.state.embed.weight.exp_avg" in stored
    rest = load(plain.parent / "sharded" / "meta.pt")
    assert rest.keys() == lightning_state().keys() - {"state_dict", "optimizer_states"}


def test_module_versions_of_shards_come_back_where_plain_lightning_has_them(fairlead: Command, tmp_path: Path) -> None:
    state = lightning_state(named=True)
    state["optimizer_states"] = state["optimizer_states"][:1]
    names = [list(state["optimizer_states"][0]["param_groups"][0]["param_names"])]
    DistributedCheckpointIO(DistributedCheckpointIOConfig()).submit_shards(
        state, tmp_path / "sharded", lambda hashes: None, names=names
    )
    assert fairlead("consolidate", "sharded", "-o", "one.ckpt").code == 0
    found = load(tmp_path / "one.ckpt")
    assert found.keys() == state.keys()
    assert found["state_dict"]._metadata == state["state_dict"]._metadata
    assert fairlead("diff", "sharded", "one.ckpt").code == 0


WRAPPED = ("embed._orig_mod.weight", "_fsdp_wrapped_module.low", "head._checkpoint_wrapped_module._orig_mod.weight")
PLAIN = ["embed.weight", "low", "head.weight"]


@pytest.mark.parametrize("to", ["torch", "distributed", "safetensors"])
@pytest.mark.parametrize("kind", ["torch", "distributed", "tensors of DDP", "a layer called module"])
def test_names_of_wrappers_are_taken_out(fairlead: Command, tmp_path: Path, kind: str, to: str) -> None:
    """Of weights and of the parameters of optimizers, in whatever format they were; a user's own `module` stays."""
    ours = "module." if kind == "a layer called module" else ""
    names = [f"{ours}{name}" for name in WRAPPED]
    parameters = {name: torch.nn.Parameter(torch.randn(3)) for name in names}
    optimizer = torch.optim.SGD(list(parameters.items()), lr=0.1, momentum=0.9)
    for parameter in parameters.values():
        parameter.grad = torch.randn(3)
    optimizer.step()
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    state = lightning_state() | {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    if kind == "distributed":
        DistributedCheckpointIO(DistributedCheckpointIOConfig()).submit_shards(
            state, tmp_path / "a", lambda hashes: None, names=[names]
        )
    elif kind == "tensors of DDP":
        torch.save({f"module.{name}": value for name, value in state["state_dict"].items()}, tmp_path / "a")
    else:
        torch.save(state, tmp_path / "a")
    words = ["--weights"] if kind == "tensors of DDP" else []
    assert fairlead("convert", "a", "b", "--to", to, *words).code == 0
    assert fairlead("convert", "b", "c", "--to", "torch").code == 0
    found = load(tmp_path / "c")
    assert sorted(found["state_dict"]) == sorted(f"{ours}{name}" for name in PLAIN)
    assert not any(part in (tmp_path / "c").read_bytes() for part in (b"_orig_mod", b"_wrapped_module"))
    if to != "safetensors" and kind != "tensors of DDP":
        (group,) = found["optimizer_states"][0]["param_groups"]
        assert group["param_names"] == [f"{ours}{name}" for name in PLAIN]


def test_safetensors_and_back(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    """Tied weights are written once, by the library's own way, which its loader understands."""
    assert fairlead("convert", plain, "w.safetensors", "--to", "safetensors").code == 0
    weights = lightning_state()["state_dict"]
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights) - {"head.weight"}
        assert file.metadata()["head.weight"] == "embed.weight"
        assert file.metadata()["step"] == "7"
    net = Net()
    load_model(net, str(tmp_path / "w.safetensors"))
    assert same(dict(net.state_dict()), dict(weights))
    assert fairlead("convert", "w.safetensors", "w.ckpt", "--to", "torch").code == 0
    assert same(load(tmp_path / "w.ckpt")["state_dict"], dict(weights))
    assert fairlead("diff", "w.safetensors", plain).code == 0


def test_weights_alone(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    fairlead("convert", plain, "w.ckpt", "--to", "torch", "--weights")
    kept = load(tmp_path / "w.ckpt")
    assert "optimizer_states" not in kept
    assert kept["hyper_parameters"] == {"width": 4}
    assert fairlead("diff", "w.ckpt", plain, "--weights").code == 0


def test_what_is_no_tensor_is_left_out_of_safetensors_loudly(fairlead: Command, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2), "scale._extra_state": {"x": 1}}}, tmp_path / "a.ckpt")
    said = fairlead("convert", "a.ckpt", "w.safetensors", "--to", "safetensors", "--json")
    assert said.document["left_out"] == ["scale._extra_state"]
    assert "left out" in said.err


def test_a_file_of_nothing_but_tensors_is_weights(fairlead: Command, tmp_path: Path) -> None:
    torch.save(OrderedDict(a=torch.ones(2)), tmp_path / "weights.pt")
    for to in ("safetensors", "distributed"):
        assert fairlead("convert", "weights.pt", f"w.{to}", "--to", to).code == 0
        assert fairlead("diff", f"w.{to}", "weights.pt").code == 0
    torch.save({"step": 3}, tmp_path / "nothing.pt")
    said = fairlead("convert", "nothing.pt", "n.safetensors", "--to", "safetensors")
    assert (said.code, "this file holds no weights" in said.err) == (2, True)


@pytest.mark.parametrize(("groups", "extra"), [(2, False), (1, True)])
def test_optimizers_whose_parameters_cannot_be_told_are_refused(
    fairlead: Command, tmp_path: Path, groups: int, extra: bool
) -> None:
    state = lightning_state(groups=groups)
    if extra:
        state["state_dict"]["more"] = torch.ones(1)
    torch.save(state, tmp_path / "a.ckpt")
    said = fairlead("convert", "a.ckpt", "sharded", "--to", "distributed")
    assert (said.code, "not certain" in said.err, "--weights" in said.err) == (2, True, True)
    assert left(tmp_path) == {"a.ckpt"}
    assert fairlead("convert", "a.ckpt", "sharded", "--to", "distributed", "--weights").code == 0


# -- DeepSpeed


@pytest.mark.parametrize("stage_number", [2, 3])
def test_a_deepspeed_folder_becomes_one_file(fairlead: Command, tmp_path: Path, stage_number: int) -> None:
    """What real ranks of DeepSpeed have written, with the weights that they had."""
    folder = shutil.copytree(RECORDED / f"zero{stage_number}", tmp_path / "zero")
    expected = load(folder / "expected.pt")
    said = fairlead("consolidate", "zero", "-o", "one.ckpt")
    assert said.code == 2
    assert "deepspeed.runtime.fp16.loss_scaler.LossScaler" in said.err
    assert "--trust" in said.err
    assert fairlead("consolidate", "zero", "-o", "one.ckpt", *TRUST).code == 0
    state = load(tmp_path / "one.ckpt")
    assert same(dict(state.pop("state_dict")), expected)
    assert state == {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6"}
    assert fairlead("convert", "zero/checkpoint", "w.safetensors", "--to", "safetensors", *TRUST).code == 0
    (folder / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    said = fairlead("consolidate", "zero", "-o", "two.ckpt", *TRUST)
    assert (said.code, "DeepSpeed cannot put this folder together" in said.err) == (2, True)
    assert "two.ckpt" not in left(tmp_path)


# -- nothing in a checkpoint is run


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("place", ["file", "metadata", "entry", "rest", "deepspeed", "deepspeed-old"])
def test_nothing_is_unpickled_that_was_not_named(fairlead: Command, plain: Path, tmp_path: Path, place: str) -> None:
    """A checkpoint is data; in every file that a command opens."""
    mark = tmp_path / "ran"
    if place == "file":
        torch.save({"state_dict": {}, "x": Evil(mark)}, tmp_path / "bad")
    elif place.startswith("deepspeed"):
        shutil.copytree(RECORDED / "zero2", tmp_path / "bad")
        file = tmp_path / "bad" / "checkpoint" / "mp_rank_00_model_states.pt"
        # The old format has no table of contents to refuse it by.
        torch.save({"module": {}, "x": Evil(mark)}, file, _use_new_zipfile_serialization=place == "deepspeed")
    else:
        fairlead("convert", plain, "bad", "--to", "distributed")
        if place == "metadata":
            (tmp_path / "bad" / CONTENTS).write_bytes(pickle.dumps(Evil(mark)))
        elif place == "rest":
            torch.save({"x": Evil(mark)}, tmp_path / "bad" / "meta.pt")
        else:
            import torch.distributed.checkpoint as dcp

            shutil.rmtree(tmp_path / "bad")
            with pytest.warns(UserWarning, match="torch.distributed is disabled"):
                dcp.save({"state_dict": {"w": torch.ones(1), "x": Evil(mark)}}, checkpoint_id=tmp_path / "bad")
    for words in (("consolidate", "bad", "-o", "out"), ("diff", "bad", plain), ("verify", "bad")):
        trust = TRUST if place.startswith("deepspeed") and words[0] != "verify" else ()
        said = fairlead(*words, *trust)
        assert not mark.exists(), words
        if words[0] != "verify":
            assert said.code == 2, said.out
            assert "mkdir" in said.err, said.err
    assert "out" not in left(tmp_path)


def test_what_is_named_is_loaded(fairlead: Command, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "x": Namespace(lr=0.5)}, tmp_path / "a.ckpt")
    refused = fairlead("convert", "a.ckpt", "b.ckpt", "--to", "torch")
    assert (refused.code, "add: --trust argparse.Namespace" in refused.err) == (2, True)
    for to, words in (("torch", "a.ckpt b.ckpt"), ("distributed", "b.ckpt d"), ("torch", "d e.ckpt")):
        assert fairlead("convert", *words.split(), "--to", to, "--trust", "argparse.Namespace").code == 0
    with torch.serialization.safe_globals([Namespace]):
        assert load(tmp_path / "e.ckpt")["x"] == Namespace(lr=0.5)
    for wrong in ("argparse.Namespaces", "Namespace", "argparse.Name space"):
        said = fairlead("convert", "a.ckpt", "c.ckpt", "--to", "torch", "--trust", wrong)
        assert (said.code, "--trust" in said.err) == (2, True), wrong


# -- damage, and what is in the way


def test_damage_is_said_and_nothing_is_written(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    fairlead("convert", plain, "sharded", "--to", "distributed")
    fairlead("convert", plain, "w.safetensors", "--to", "safetensors")
    size = plain.stat().st_size
    weight = lightning_state()["state_dict"]["embed.weight"].numpy().tobytes()
    flip(plain, at=plain.read_bytes().index(weight) + 5)
    os.truncate(tmp_path / "w.safetensors", 300)
    next((tmp_path / "sharded").glob("*.distcp")).unlink()
    for source in (plain, "w.safetensors", "sharded"):
        said = fairlead("convert", source, "out", "--to", "torch")
        assert (said.code, said.out) == (2, ""), source
        assert "damaged" in said.err, said.err
        assert fairlead("verify", source).code == 1, source
    os.truncate(plain, size - 100)
    assert "cut off" in fairlead("convert", plain, "out", "--to", "torch").err
    assert fairlead("verify", plain).code == 1
    assert "out" not in left(tmp_path)


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1])
def test_a_damaged_length_of_a_safetensors_header_is_damage(fairlead: Command, tmp_path: Path, length: int) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    with (tmp_path / "w.safetensors").open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    said = fairlead("verify", "w.safetensors")
    assert (said.code, "its header is damaged" in said.out) == (1, True), said.err
    assert "damaged" in fairlead("convert", "w.safetensors", "out", "--to", "torch").err


def test_metadata_that_leads_out_of_the_folder_is_refused(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    fairlead("convert", plain, "sharded", "--to", "distributed")
    path = tmp_path / "sharded" / CONTENTS
    data = path.read_bytes()
    assert b"__0_0.distcp" in data
    path.write_bytes(data.replace(b"__0_0.distcp", b"../plain.ckp"))
    assert "outside of its folder" in fairlead("convert", "sharded", "out", "--to", "torch").err


def test_nothing_is_overwritten_unasked(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "b.ckpt").write_bytes(b"precious")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_bytes(b"precious")
    assert "the destination exists" in fairlead("convert", plain, "b.ckpt", "--to", "torch").err
    assert (tmp_path / "b.ckpt").read_bytes() == b"precious"
    for target in ("home", plain, tmp_path):
        assert fairlead("convert", plain, target, "--to", "distributed", "--overwrite").code == 2
    assert (tmp_path / "home" / "thesis").read_bytes() == b"precious"
    assert fairlead("convert", plain, "b.ckpt", "--to", "torch", "--overwrite").code == 0
    for _ in range(2):
        assert fairlead("convert", plain, "sharded", "--to", "distributed", "--overwrite").code == 0
    assert left(tmp_path) == {"b.ckpt", "home", "plain.ckpt", "sharded"}


def test_a_destination_that_cannot_be_written(fairlead: Command, plain: Path, tmp_path: Path) -> None:
    for target in (plain / "x.ckpt", "/proc/x.ckpt", "n" * 300):
        said = fairlead("convert", plain, target, "--to", "torch")
        assert (said.code, said.out) == (2, ""), target
        assert said.err.startswith("error: "), said.err
        assert "defect" not in said.err


def test_a_full_disk_leaves_what_was_there(
    fairlead: Command, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from fairlead_runs.commit import Syscalls

    (tmp_path / "b.ckpt").write_bytes(b"old")

    def full(self: Syscalls, fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Syscalls, "fsync", full)
    for to in ("torch", "safetensors"):
        said = fairlead("convert", plain, "b.ckpt", "--to", to, "--overwrite")
        assert (said.code, "No space left" in said.err) == (2, True)
    assert (tmp_path / "b.ckpt").read_bytes() == b"old"
    assert left(tmp_path) == {"b.ckpt", "plain.ckpt"}


def test_of_a_run_the_newest_complete_one_is_taken(fairlead: Command, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "gpt" / "checkpoints"
    for step in (7, 8):
        staged = stage(root, f"step-{step:08d}", token="s1")
        torch.save({**lightning_state(), "global_step": step}, staged / "state.ckpt")
        publish(staged, {"step": step, "start": 1})
    (root / "step-00000008" / "state.ckpt").unlink()
    assert fairlead("consolidate", "runs/gpt").code == 0
    assert load(tmp_path / "gpt-step-00000007.ckpt")["global_step"] == 7
    (root / "step-00000007" / "state.ckpt").unlink()
    assert "no complete checkpoint" in fairlead("consolidate", "runs/gpt").err


def test_a_folder_of_hugging_faces_trainer(fairlead: Command, tmp_path: Path) -> None:
    """Compared and converted as any other; its weights may be in several files, its generators are numpy's."""
    state = lightning_state()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        weights = {key: value.clone() for key, value in state["state_dict"].items()}
        save_file({key: value for key, value in weights.items() if key == "low"}, folder / "model-1.safetensors")
        save_file({key: value for key, value in weights.items() if key != "low"}, folder / "model-2.safetensors")
        torch.save(state["optimizer_states"][0], folder / "optimizer.pt")
        torch.save({"numpy": np.random.RandomState(1).get_state()}, folder / "rng_state.pth")
        (folder / "trainer_state.json").write_text(json.dumps({"epoch": 1.5, "global_step": 7}))
    assert fairlead("diff", "one", "two").code == 0
    (tmp_path / "two" / "trainer_state.json").write_text(json.dumps({"epoch": 1.5, "global_step": 8}))
    torch.save({"numpy": np.random.RandomState(2).get_state()}, tmp_path / "two" / "rng_state.pth")
    names = [one["name"] for one in fairlead("diff", "one", "two", "--json").document["differences"]]
    assert {"global_step", "rank-00000.rng.numpy.1"} <= set(names)
    assert fairlead("convert", "one", "plain.ckpt", "--to", "torch").code == 0
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert torch.equal(plain["state_dict"]["low"], state["state_dict"]["low"])
    assert plain["global_step"] == 7
