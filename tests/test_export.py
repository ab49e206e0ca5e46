"""Promise: a checkpoint leaves zerox as plain safetensors, whole, tied once and verified; and it can be looked at."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import Scalars, alone, on_ranks, random_batch, tiny_gpt
from zerox import dtypes, nn
from zerox.checkpoint import CheckpointError, consolidate, read_weights
from zerox.checkpoint.manifest import NAME
from zerox.cli_tools import parse_bytes


def fixed(*values: float) -> nn.Parameter:
    return nn.Parameter(len(values), init=nn.values(np.array(values)))


def tied_model() -> nn.Module:
    b = fixed(3, 4)
    return Scalars(lambda m: (m.A * m.B * m.C).sum(), A=fixed(1, 2), B=b, C=b)


def saved(path: Path, model: Any, world: int = 2, *, steps: int = 0, **options: Any) -> dict[str, np.ndarray]:
    """A checkpoint; -> the live weights."""

    def rank(comm: zx.Comm) -> dict[str, np.ndarray]:
        with zx.Engine(model(), zx.AdamW(lr=1e-2), comm=comm, **{"zero": 3, **options}) as e:
            for s in range(steps):
                e.train_step(random_batch(s))
            e.save(path)
            return e.parameters()

    return on_ranks(world, rank)[0]


def parse(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """metadata, tensors, bytes of values: by the format's definition, without zerox."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return header.pop("__metadata__"), header, content[8 + size :]


@pytest.mark.parametrize("out, most", [("all.safetensors", None), ("folder", None), ("folder", 8), ("folder", 7)])
def test_d8_ties_and_shards_in_the_export(out: str, most: int | None, tmp_path: Path) -> None:
    """Case D8: A = [1, 2], B = [3, 4], C tied to B; stage 3, world 2; one file, and files of at most 8 bytes."""
    saved(tmp_path / "c", tied_model)
    files = consolidate(tmp_path / "c", tmp_path / out, max_shard_bytes=most)
    assert all(f.is_file() for f in files)
    n_bytes = 0
    for file in files:
        if file.suffix == ".json":
            continue
        metadata, tensors, data = parse(file)
        assert sum(math.prod(t["shape"]) * 4 for t in tensors.values()) == len(data)
        assert most is None or len(tensors) == 1
        assert metadata.get("C") == ("B" if "B" in tensors else None)
        assert all(isinstance(v, str) for v in metadata.values())
        n_bytes += len(data)
    assert n_bytes == 16, "B's data is stored once"
    assert len(files) == (3 if most else 1)
    if most:
        index = json.loads((tmp_path / out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 16
        assert index["weight_map"] == {f"{n}": f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "A"), (2, "B"))}
    values = read_weights(tmp_path / out)
    assert {k: v.tolist() for k, v in values.items()} == {"A": [1, 2], "B": [3, 4], "C": [3, 4]}
    values["B"][0] = 9
    assert values["C"].tolist() == [9, 4], "after load, changing B changes C"
    assert read_weights(tmp_path / out)["B"].tolist() == [3, 4], "and not the file"

    def load(comm: zx.Comm) -> dict[str, np.ndarray]:
        with zx.Engine(tied_model(), comm=comm, zero=3, init=False) as e:
            e.load_parameters(values)
            return e.parameters()

    for live in on_ranks(2, load):
        assert {k: v.tolist() for k, v in live.items()} == {"A": [1, 2], "B": [9, 4], "C": [9, 4]}


@pytest.mark.parametrize("world, zero", [(1, 0), (3, 3), (4, 1)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_export_equals_the_live_weights(precision: str, world: int, zero: int, tmp_path: Path) -> None:
    live = saved(tmp_path / "c", tiny_gpt, world, steps=2, precision=precision, zero=zero)
    consolidate(tmp_path / "c", tmp_path / "m.safetensors")
    consolidate(tmp_path / "c", tmp_path / "s.safetensors", dtype="stored")
    masters, stored = read_weights(tmp_path / "m.safetensors"), read_weights(tmp_path / "s.safetensors")
    assert set(masters) == set(stored) == set(live)
    for name, value in live.items():
        assert masters[name].dtype == np.float32 and masters[name].shape == value.shape
        if precision == "fp32":
            assert np.array_equal(stored[name], value) and np.array_equal(masters[name], value)
        else:
            assert np.array_equal(dtypes.from_bfloat16(stored[name]), value), name
            assert np.array_equal(dtypes.to_bfloat16(masters[name]), stored[name]), name
    if precision == "bf16":
        assert any((dtypes.from_bfloat16(stored[n]) != masters[n]).any() for n in live), "masters hold more digits"


def test_other_readers_open_it(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    live = saved(tmp_path / "c", tiny_gpt, steps=1)
    consolidate(tmp_path / "c", tmp_path / "m.safetensors")
    read = numpy_reader.load_file(tmp_path / "m.safetensors")
    assert all(np.array_equal(value, live[name]) for name, value in read.items())


def test_double_precision_and_empty_parameters(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return Scalars(lambda m: m.w.sum(), w=fixed(1 / 3, 2 / 3, 1), z=nn.Parameter(0, 8))

    saved(tmp_path / "c", model, precision="fp64")
    consolidate(tmp_path / "c", tmp_path / "m.safetensors")
    values = read_weights(tmp_path / "m.safetensors")
    assert values["w"].dtype == np.float64 and values["w"].tolist() == [1 / 3, 2 / 3, 1]
    assert values["z"].shape == (0, 8)


def flip(folder: Path) -> str:
    file = sorted(folder.glob("weights-*"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return f"{file.name} is damaged"


def cut(folder: Path) -> str:
    file = sorted(folder.glob("weights-*"))[-1]
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name} has "


def delete(folder: Path) -> str:
    file = sorted(folder.glob("weights-*"))[-1]
    file.unlink()
    return f"{file.name} is missing"


def without_manifest(folder: Path) -> str:
    (folder / NAME).unlink()
    return "no complete checkpoint"


def one_rank_short(folder: Path) -> str:
    """A manifest that fits its own checksum and lacks a rank's pieces."""
    import dataclasses

    from zerox.checkpoint import Manifest

    whole = Manifest.decode((folder / NAME).read_bytes(), NAME)
    kept = tuple(p for p in whole.pieces if "-00001-of-" not in p.file)
    (folder / NAME).write_bytes(dataclasses.replace(whole, pieces=kept).encode())
    return "not complete"


@pytest.mark.parametrize("damage", [flip, cut, delete, without_manifest, one_rank_short])
@pytest.mark.parametrize("out", ["m.safetensors", "new/folder"])
def test_incomplete_checkpoints_are_refused_and_nothing_is_left(damage: Any, out: str, tmp_path: Path) -> None:
    saved(tmp_path / "c", tiny_gpt, steps=1)
    said = damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match=said):
        consolidate(tmp_path / "c", tmp_path / out, max_shard_bytes=None if "." in out else 2000)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_existing_files_stay_unless_told(tmp_path: Path) -> None:
    saved(tmp_path / "c", tied_model)
    out = tmp_path / "m.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="overwrite"):
        consolidate(tmp_path / "c", out)
    assert out.read_bytes() == b"mine"
    consolidate(tmp_path / "c", out, overwrite=True)
    assert read_weights(out)["A"].tolist() == [1, 2]
    folder = tmp_path / "f"
    consolidate(tmp_path / "c", folder, max_shard_bytes=8)
    (folder / "README").write_text("mine")
    consolidate(tmp_path / "c", folder, overwrite=True)
    assert sorted(p.name for p in folder.iterdir()) == ["README", "model.safetensors"]
    consolidate(tmp_path / "c", folder, overwrite=True, max_shard_bytes=8)
    assert len(list(folder.iterdir())) == 4 and set(read_weights(folder)) == {"A", "B", "C"}


@pytest.mark.parametrize(
    "options, out, text",
    [
        ({"dtype": "fp16"}, "m.safetensors", "'fp16'"),
        ({"max_shard_bytes": 0}, "folder", "at least 1"),
        ({"max_shard_bytes": 8}, "m.safetensors", "needs a folder"),
    ],
)
def test_wrong_options(options: dict[str, Any], out: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        consolidate(tmp_path / "c", tmp_path / out, **options)


def test_broken_weight_files_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "c", tied_model)
    good = tmp_path / "m.safetensors"
    consolidate(tmp_path / "c", good)
    content = good.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for n in range(len(content)):
        bad.write_bytes(content[:n])
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            read_weights(bad)
    size = int.from_bytes(content[:8], "little")
    for wrong in (
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 3},
        [1],
    ):
        text = json.dumps(wrong).encode().ljust(size)
        bad.write_bytes(content[:8] + text + content[8 + size :])
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            read_weights(bad)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_weights(tmp_path / "nowhere.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../m.safetensors"}}')
    with pytest.raises(CheckpointError, match="elsewhere"):
        read_weights(tmp_path)


def zerox_says(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "zerox", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_command_line(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "step-2", tiny_gpt, steps=2, precision="bf16")
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        e.save(tmp_path / "run" / "step-0")
    code, said, error = zerox_says("checkpoint", "show", tmp_path / "run", "--verify")
    assert code == 0, error
    for text in ("2 complete", "step-2", "GPT ", "vocab=61", "2 ranks, zero=3, bf16", "adamw ", "lr=0.01", "verified",
                 "blocks.0."):  # fmt: skip
        assert text in said, text
    code, said, error = zerox_says("checkpoint", "consolidate", tmp_path / "run", tmp_path / "out",
                                   "--max-shard-bytes", "20kB")  # fmt: skip
    assert code == 0, error
    assert len(said.splitlines()) == len(list((tmp_path / "out").iterdir())) > 2
    code, _, error = zerox_says("checkpoint", "consolidate", tmp_path / "run", tmp_path / "out")
    assert code == 1 and "exists" in error and "Traceback" not in error
    flip(tmp_path / "run" / "step-2")
    code, said, error = zerox_says("checkpoint", "show", tmp_path / "run", "--verify")
    assert code == 1 and "damaged" in error
    code, _, error = zerox_says("checkpoint", "show", tmp_path / "nowhere")
    assert code == 1 and "does not exist" in error


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "500 mb": 5 * 10**8, "2GiB": 2**31, "1_000": 1000, "1.5kB": 1500, "8": 8}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "0", "-5GB", "5 parsecs", "1e400GB"):
        with pytest.raises(Exception, match="is no size"):
            parse_bytes(text)


def test_every_failing_primitive_leaves_nothing(tmp_path: Path) -> None:
    """The n-th fallible step of an export fails, for every n: an error, no file, and the next try succeeds."""
    from zerox import _C

    saved(tmp_path / "c", tied_model)
    files = consolidate(tmp_path / "c", tmp_path / "out", max_shard_bytes=8)
    before = {f: f.read_bytes() for f in files}
    n = 0
    while True:
        n += 1
        _C.fault_arm(n)
        try:
            consolidate(tmp_path / "c", tmp_path / "new" / "out", max_shard_bytes=8)
            break
        except (_C.ZeroxError, CheckpointError, OSError):
            left = [p for p in (tmp_path / "new").rglob("*") if p.is_file()] if (tmp_path / "new").exists() else []
            assert not left or sorted(p.name for p in left) == sorted(f.name for f in files), "all or nothing"
            for file in left:
                assert file.read_bytes() == before[tmp_path / "out" / file.name]
                file.unlink()
        finally:
            _C.fault_arm(0)
    assert n > 10, "the faults were really passed"
