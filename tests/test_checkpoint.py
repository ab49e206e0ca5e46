"""Checkpoints: any number of ranks and any stage load what any other saved; nothing is lost, nothing half-loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import Scalars, alone, on_ranks, random_batch, tiny_gpt
from zerox import nn
from zerox.checkpoint import CheckpointError, Manifest, find
from zerox.checkpoint.manifest import NAME


def engine(comm: zx.Comm, model: Any = None, **options: Any) -> zx.Engine:
    return zx.Engine(model or tiny_gpt(), zx.AdamW(lr=1e-2), comm=comm, **{"zero": 3, **options})


def trained(world: int, path: Path, *, steps: int = 3, **options: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    """Saves after `steps` steps; -> weights then, losses of the next two steps on fixed batches."""

    def rank(comm: zx.Comm) -> tuple[dict[str, np.ndarray], list[float]]:
        with engine(comm, **options) as e:
            for s in range(steps):
                e.train_step(random_batch(s * world + comm.rank))
            e.save(path, data={"position": steps})
            weights = e.parameters()
            return weights, [float(e.train_step(random_batch(100 + s))) for s in range(2)]

    return on_ranks(world, rank)[0]


def resumed(world: int, path: Path, **options: Any) -> tuple[dict[str, np.ndarray], list[float], Any, int]:
    def rank(comm: zx.Comm) -> Any:
        with engine(comm, init=False, **options) as e:
            data = e.load(path)
            weights, step = e.parameters(), e.steps
            return weights, [float(e.train_step(random_batch(100 + s))) for s in range(2)], data, step

    return on_ranks(world, rank)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saved, zero_saved", [(1, 0), (2, 3), (3, 1), (4, 3)])
def test_any_layout_loads_any_other(saved: int, zero_saved: int, precision: str, tmp_path: Path) -> None:
    """Weights bitwise; the steps that follow use the same moments (losses within rounding at another world size)."""
    path = tmp_path / "checkpoint"
    weights, losses = trained(saved, path, zero=zero_saved, precision=precision)
    for world, zero in ((1, 3), (2, 0), (3, 2), (4, 3), (saved, zero_saved)):
        got, after, data, step = resumed(world, path, zero=zero, precision=precision)
        for name, value in weights.items():
            assert np.array_equal(got[name], value), (world, zero, name)
        assert data == {"position": 3} and step == 3
        assert np.allclose(after, losses, rtol=1e-5 if precision == "fp32" else 5e-3), (world, zero)


def test_bf16_takes_up_fp32_and_back(tmp_path: Path) -> None:
    weights, _ = trained(2, tmp_path / "a", precision="fp32")
    got, _, _, _ = resumed(1, tmp_path / "a", precision="bf16")
    for name, value in weights.items():
        assert np.allclose(got[name], value, rtol=2**-8), name


def test_padding_is_never_stored(tmp_path: Path) -> None:
    """Case D1: 10 elements saved at world 4 load at 1, 3, 6, 7; case D2: 7 elements saved at world 16."""
    for n, saved, loads in ((10, 4, (1, 3, 6, 7)), (7, 16, (1, 5)), (100, 2, (3,))):
        values = np.arange(n, dtype=np.float32)
        path = tmp_path / str(n)

        def model(n: int = n) -> nn.Module:
            return Scalars(lambda m: (m.w * m.w).sum(), w=nn.Parameter(n, init=nn.values(np.arange(n))))

        def save(comm: zx.Comm, path: Path = path, model: Any = model) -> None:
            with engine(comm, model()) as e:
                e.save(path)

        on_ranks(saved, save)
        manifest = Manifest.decode((path / NAME).read_bytes(), "m")
        for kind in ("param", "moment1", "moment2"):
            runs = sorted((p.begin, p.n) for p in manifest.pieces if p.kind == kind)
            assert sum(count for _, count in runs) == n and [b for b, _ in runs] == list(
                np.cumsum([0, *[c for _, c in runs]])[:-1]
            )

        def load(comm: zx.Comm, path: Path = path, model: Any = model) -> np.ndarray:
            with engine(comm, model(), init=False) as e:
                e.load(path)
                return e.parameter("w")

        for world in loads:
            assert np.array_equal(on_ranks(world, load)[-1], values), (n, world)


def test_folder_of_checkpoints_gives_the_newest_complete(tmp_path: Path) -> None:
    with alone() as comm, engine(comm) as e:
        for s in range(3):
            e.train_step(random_batch(s))
            e.save(tmp_path / f"step-{e.steps}")
        (tmp_path / "step-3" / NAME).unlink()
        (tmp_path / "step-9.partial-0").mkdir()
        assert find(tmp_path) == tmp_path / "step-2"
        e.load(tmp_path)
        assert e.steps == 2


def test_keep_and_replace(tmp_path: Path) -> None:
    """Case D12: world 4, keep the last 1, 5 saves in a row, repeated: exactly one complete folder, nothing else."""

    def rank(comm: zx.Comm) -> None:
        with engine(comm) as e:
            for s in range(5):
                e.train_step(random_batch(s))
                e.save(tmp_path / f"step-{s}", keep=1)
            e.save(tmp_path / "step-4", keep=1)  # replaces

    for _ in range(3):
        on_ranks(4, rank)
        assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def damage_truncate(folder: Path) -> str:
    file = sorted(folder.glob("state-*"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


def damage_flip(folder: Path) -> str:
    file = sorted(folder.glob("weights-*"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file.name


def damage_delete(folder: Path) -> str:
    file = sorted(folder.glob("state-*"))[-1]
    file.unlink()
    return file.name


def damage_manifest(folder: Path) -> str:
    body = json.loads((folder / NAME).read_text())
    body["step"] += 1
    (folder / NAME).write_text(json.dumps(body))
    return NAME


def damage_manifest_cut(folder: Path) -> str:
    (folder / NAME).write_text((folder / NAME).read_text()[:-20])
    return NAME


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_delete, damage_manifest, damage_manifest_cut])
def test_damage_is_named_and_changes_nothing(damage: Any, tmp_path: Path) -> None:
    """Case D9: load raises on all ranks with the file's name, and the live weights are untouched."""
    path = tmp_path / "c"
    trained(4, path)
    name = damage(path)

    def rank(comm: zx.Comm) -> str:
        with engine(comm) as e:
            e.train_step(random_batch(comm.rank))
            before = e.parameters()
            with pytest.raises(CheckpointError) as caught:
                e.load(path)
            after = e.parameters()
            assert all(np.array_equal(before[n], after[n]) for n in before) and e.steps == 1
            e.train_step(random_batch(comm.rank))  # as good as before
            return str(caught.value)

    for text in on_ranks(4, rank):
        assert name in text


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    trained(1, path)
    with alone() as comm:
        with engine(comm, tiny_gpt(layers=2)) as e, pytest.raises(CheckpointError, match=r"blocks\.2"):
            e.load(path)
        with engine(comm, tiny_gpt(channels=18)) as e, pytest.raises(CheckpointError, match="shape"):
            e.load(path)
        with zx.Engine(tiny_gpt(), zx.SGD(), comm=comm) as e:
            with pytest.raises(CheckpointError, match="optimizer=False"):
                e.load(path)
            e.load(path, optimizer=False)
            assert e.steps == 0
        with engine(comm) as e, pytest.raises(CheckpointError, match="does not exist"):
            e.load(tmp_path / "nowhere")


def test_failed_save_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on one rank reaches every rank; no partial folder stays; the earlier checkpoint loads."""
    path = tmp_path / "c"

    def rank(comm: zx.Comm) -> str:
        with engine(comm) as e:
            e.train_step(random_batch(comm.rank))
            e.save(path)
            e.train_step(random_batch(comm.rank))
            read = e.core.read_slice
            if comm.rank == 1:
                monkeypatch.setattr("zerox.checkpoint.saving.write_safetensors", failing(comm.rank))
            comm.barrier()
            with pytest.raises((CheckpointError, OSError)) as caught:
                e.save(path)
            assert read is not None
            e.load(path)
            assert e.steps == 1
            return str(caught.value)

    texts = on_ranks(2, rank)
    assert all("disk is full" in t for t in texts)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def failing(rank: int) -> Any:
    def write(*_: Any) -> Any:
        raise OSError(28, "disk is full")

    return write


def test_frozen_values_are_linked(tmp_path: Path) -> None:
    """The file of frozen parameters is written once and linked by later saves; removing the first keeps the second."""

    def model() -> nn.Module:
        frozen = nn.Parameter(1000, init=nn.values(np.arange(1000)), trainable=False)
        return Scalars(lambda m: ((m.f * m.w) * m.f).mean(), f=frozen, w=nn.Parameter(1000, init=nn.ones))

    with alone() as comm, engine(comm, model()) as e:
        for s in range(2):
            e.train_step()
            e.save(tmp_path / str(s))
        files = [next((tmp_path / str(s)).glob("frozen-*")) for s in range(2)]
        assert os.stat(files[0]).st_ino == os.stat(files[1]).st_ino
        shutil.rmtree(tmp_path / "0")
        w = e.parameter("w")
        e.train_step()
        e.load(tmp_path / "1")
        assert np.array_equal(e.parameter("w"), w) and np.array_equal(e.parameter("f"), np.arange(1000))


def test_files_are_safetensors(tmp_path: Path) -> None:
    """Eight bytes of length, a JSON header, the values: any safetensors reader can open a shard."""
    trained(2, tmp_path / "c")
    for file in (tmp_path / "c").glob("*.safetensors"):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        ends = [t["data_offsets"][1] for t in header.values()]
        assert max(ends) == len(content) - 8 - size
        for tensor in header.values():
            assert tensor["dtype"] in ("F32", "BF16")
            begin, end = tensor["data_offsets"]
            assert end - begin == np.prod(tensor["shape"]) * {"F32": 4, "BF16": 2}[tensor["dtype"]]
