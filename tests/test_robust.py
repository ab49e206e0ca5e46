"""What users do wrong, or at a bad moment: an error that says so or the right result, never a silent wrong number."""

from __future__ import annotations

import csv
import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import alone, on_ranks, random_batch, tiny_gpt
from zerox import dtypes, nn
from zerox.checkpoint import CheckpointError, find
from zerox.checkpoint.files import _named, lock_folder
from zerox.cli import main

IDS = np.arange(48).reshape(2, 24) % 61
LIMIT_S = 40.0


class Regressor(nn.Module):
    """Mean squared error of a linear map with a frozen part."""

    def __init__(self) -> None:
        self.part = nn.Linear(3, 5, init=nn.normal(0.5))
        self.part.weight.trainable = False
        self.last = nn.Linear(5, 1, init=nn.normal(0.5))

    def forward(self, x: Any, y: Any) -> Any:
        error = self.last(nn.gelu(self.part(x))) + y * -1.0
        return (error * error).mean()


def pairs(n: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((4, 3)), rng.standard_normal((4, 1))) for _ in range(n)]


# ---- inputs ----


@pytest.mark.parametrize("shift", [1 << 32, -(1 << 32), 1 << 40])
def test_ids_do_not_wrap(shift: int) -> None:
    """Token 2**32 + 5 is not token 5; a label of -2**32 + 5 is not label 5."""
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        for tokens, targets in ((IDS + shift, IDS), (IDS, IDS + shift)):
            with pytest.raises(ValueError, match="32 bits"):
                e.train_step(tokens, targets)
            with pytest.raises(ValueError, match="32 bits"):
                batch = dataclasses.replace(random_batch(0), tokens=tokens.ravel(), targets=targets.ravel())
                e.train_step(batch)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tokens": random_batch(0).tokens + 0.5}, "tokens of a Batch"),
        ({"tokens": random_batch(0).tokens.reshape(2, 24)}, "tokens of a Batch"),
        ({"cu_seqlens": np.array([0, 100], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0, 30, 20, 48], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([5, 48], np.int32)}, "cu_seqlens"),
        ({"cu_seqlens": np.array([], np.int32)}, "cu_seqlens"),
    ],
)
def test_batches_of_ones_own_are_checked(change: dict[str, Any], says: str) -> None:
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e, pytest.raises(ValueError, match=says):
        e.train_step(dataclasses.replace(random_batch(0), **change))


def test_logits_take_tokens_or_a_batch() -> None:
    """The same numbers as from the forward's own inputs, and nothing but one argument."""
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        whole = e.logits(IDS)
        assert whole.shape == (48, 61)
        assert np.allclose(e.logits(IDS[0])[:24], whole[:24], rtol=0, atol=1e-6)
        assert e.logits(random_batch(0)).shape == (48, 61)
        for wrong in ((), (IDS, IDS)):
            with pytest.raises(TypeError, match="logits"):
                e.logits(*wrong)
        with pytest.raises(TypeError, match="got 0 inputs"):
            e.train_step()


def test_what_is_no_model_is_named() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(3)
            self.child = nn.Linear(3, 3)
            self.child.parent = self

    with alone() as comm:
        for model, optimizer, says in ((None, None, "model"), (tiny_gpt, None, "model"), (tiny_gpt(), "adam", "AdamW")):
            with pytest.raises(TypeError, match=says):
                zx.Engine(model, optimizer, comm=comm)
        with pytest.raises(ValueError, match=r"child\.parent"):
            zx.Engine(Loop(), comm=comm)
        with zx.Engine(Regressor(), comm=comm) as e, pytest.raises(TypeError, match="language model"):
            e.generate("def ")
    with pytest.raises(TypeError, match="number 1 is Parameter"):
        nn.ModuleList([nn.Linear(2, 2), nn.Parameter(3)])


@pytest.mark.parametrize("what, options", [
    ("option zero", lambda r: {"zero": r}),
    ("option precision", lambda r: {"precision": ("fp32", "bf16")[r]}),
    ("option seed", lambda r: {"seed": r}),
    ("optimizer", lambda r: {"optimizer": zx.SGD(lr=0.1 + r)}),
    ("schedule", lambda r: {"schedule": zx.Schedule(warmup=r)}),
    ("model", lambda r: {"model": tiny_gpt(hidden=64 + r)}),
])  # fmt: skip
def test_ranks_that_make_different_engines(what: str, options: Any) -> None:
    """Both are told what differs; the communicator can be used on."""

    def rank(comm: zx.Comm) -> None:
        with pytest.raises(ValueError, match=rf"different engines: {what} is .* on rank 0 and .* on rank 1"):
            zx.Engine(**{"model": tiny_gpt(), "comm": comm, **options(comm.rank)})
        with zx.Engine(tiny_gpt(), comm=comm, memory_limit=(1 + comm.rank) << 28) as e:
            e.train_step(random_batch(0))

    on_ranks(2, rank, timeout=5.0)


def test_load_forgets_gradients(tmp_path: Path) -> None:
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        e.save(tmp_path / "one")
        expected = e.train_step(random_batch(0))
        e.backward(e(random_batch(1)))
        e.load(tmp_path / "one")
        assert e.train_step(random_batch(0)) == expected


def test_failed_constructor_leaves_the_communicator_free() -> None:
    """Also while the exception, and so the half-made engine, is still alive."""
    model = Regressor()
    model.last.bias.init = nn.values(np.zeros(7))
    comm = alone()
    with pytest.raises(ValueError, match="initial value of") as held:
        zx.Engine(model, comm=comm)
    comm.close()
    assert held.value and comm.closed


@pytest.mark.parametrize("zero, recompute", [(0, False), (3, False), (3, True)])
def test_forward_may_handle_the_error_of_a_block(zero: int, recompute: bool) -> None:
    """What it did before the error has no effect; the next block can be entered."""

    class Part(nn.Block):
        def __init__(self) -> None:
            self.map = nn.Linear(3, 3, init=nn.normal(0.5))

        def forward(self, x: Any, fails: bool = False) -> Any:
            y = self.map(x)
            if fails:
                raise LookupError
            return nn.gelu(y)

    class Model(nn.Module):
        def __init__(self, *, fails: bool) -> None:
            self.one, self.two, self.fails = Part(), Part(), fails

        def forward(self, x: Any) -> Any:
            if self.fails:
                with pytest.raises(LookupError):
                    self.one(x, True)
            return self.two(x).mean()

    def rank(comm: zx.Comm) -> list[list[float]]:
        losses = []
        for fails in (True, False):
            with zx.Engine(Model(fails=fails), zx.SGD(lr=0.1), comm=comm, zero=zero, recompute=recompute) as e:
                losses.append([e.train_step(pairs(1)[0][0]).loss for _ in range(3)])
        return losses

    for failed, sound in on_ranks(2, rank):
        assert failed == sound


def test_parameters_stand_for_their_values() -> None:
    """In every operation that a Tensor has, on either side."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(3, 3, init=nn.values(np.eye(3) * 2))

        def forward(self, x: Any, case: Any) -> Any:
            w = self.w
            cases = (w - x, x - w, -w, w / 4, w @ x, x @ w, w * x, x + w)
            return (cases[case.shape[0]] * x).sum()

    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    w = np.eye(3) * 2
    right = (w - x, x - w, -w, w / 4, w @ x, x @ w, w * x, x + w)
    with alone() as comm, zx.Engine(Model(), comm=comm) as e:
        for case, value in enumerate(right):
            assert e.evaluate([(x, np.zeros(case))]) == pytest.approx((value * x).sum())
    with pytest.raises(TypeError, match="add and mul take"):
        nn.add(nn.Parameter(3), 1)


def test_truth_of_a_tensor_is_its_value() -> None:
    """`if loss:` in a forward is an error of the dry run, not always true."""

    class Branch(Regressor):
        def forward(self, x: Any, y: Any) -> Any:
            loss = super().forward(x, y)
            return loss * 2.0 if loss else loss

    with alone() as comm:
        with zx.Engine(Branch(), comm=comm) as e, pytest.raises(zx.StateError, match="do not read tensors"):
            e.train_step(*pairs(1)[0])
        with zx.Engine(Regressor(), comm=comm) as e:
            assert bool(e(*pairs(1)[0]))


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1.0, 1e300])
def test_timeouts_that_no_clock_holds(timeout: float) -> None:
    with pytest.raises(ValueError, match="give seconds"):
        zx.connect(timeout=timeout)


def test_full_disk_names_the_file() -> None:
    """/dev/full stands for it: opening succeeds, writing does not."""
    with (
        pytest.raises(OSError, match="/dev/full") as caught,
        _named(Path("/dev/full")),
        open("/dev/full", "wb") as file,
    ):
        file.write(b"x" * 100000)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("temperature", [1e-320, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    """Almost 0 takes the likeliest; not a number is refused."""
    with alone() as comm, zx.Engine(tiny_gpt(vocab=300), comm=comm) as e:
        said = e.generate(b"abc", 8, temperature=temperature)
        assert len(said) == 11, "ids above 255 are no bytes: they become ?"
        if temperature < 1:
            assert said == e.generate(b"abc", 8, temperature=0.0)
        with pytest.raises(ValueError, match="temperature=nan"):
            e.generate(b"abc", 1, temperature=float("nan"))


# ---- evaluation ----


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("counts", [(3, 1), (1, 2)])
def test_unequal_numbers_of_batches(zero: int, counts: tuple[int, int]) -> None:
    """A rank that ran out takes part without being counted, whatever the model's inputs are."""
    data = pairs(sum(counts))
    parts = (data[: counts[0]], data[counts[0] :])

    def rank(comm: zx.Comm) -> float:
        with zx.Engine(Regressor(), comm=comm, zero=zero) as e:
            return e.evaluate(parts[comm.rank])

    with alone() as comm, zx.Engine(Regressor(), comm=comm) as e:
        right = e.evaluate(data)
    assert on_ranks(2, rank) == pytest.approx([right, right], rel=1e-6)


def test_no_batch_at_all_on_one_rank() -> None:
    """Every rank is told, so that nobody waits for the one that raised."""

    def rank(comm: zx.Comm) -> str:
        with zx.Engine(tiny_gpt(), comm=comm, zero=3) as e:
            with pytest.raises(ValueError, match=r"no batch on ranks \[1\]"):
                e.evaluate([random_batch(0)] if comm.rank == 0 else [])
            return f"{e.train_step(random_batch(1)).loss:.4f}"

    first, second = on_ranks(2, rank)
    assert first == second


# ---- checkpoints ----


def test_frozen_values_that_were_set_are_saved(tmp_path: Path) -> None:
    """The link to the last save's frozen file is not taken when its values are no longer those of the engine."""
    with alone() as comm, zx.Engine(Regressor(), comm=comm) as e:
        e.save(tmp_path / "one")
        e.load_parameters({name: value + 1 for name, value in e.parameters().items()})
        expected = e.parameters()
        e.save(tmp_path / "two")
        e.load(tmp_path / "one")
        e.load(tmp_path / "two")
        assert all(np.array_equal(expected[name], value) for name, value in e.parameters().items())


def test_frozen_file_that_another_engine_replaced(tmp_path: Path) -> None:
    with alone() as comm, zx.Engine(Regressor(), comm=comm) as a, zx.Engine(Regressor(), comm=comm, seed=5) as b:
        a.save(tmp_path / "latest")
        b.save(tmp_path / "latest")
        a.save(tmp_path / "mine")
        expected = a.parameters()
        a.load(tmp_path / "mine")
        assert all(np.array_equal(expected[name], value) for name, value in a.parameters().items())


def test_extra_with_keys_that_are_no_strings(tmp_path: Path) -> None:
    """JSON turns 2 and 10 into "2" and "10", which sort the other way round: the checksum is of what is read."""
    with alone() as comm, zx.Engine(Regressor(), comm=comm) as e:
        e.save(tmp_path / "one", extra={10: "b", 2: "c", True: None})
        e.load(tmp_path / "one")


def test_extra_that_is_no_json_fails_on_every_rank(tmp_path: Path) -> None:
    def rank(comm: zx.Comm) -> float:
        with zx.Engine(Regressor(), comm=comm, zero=3) as e:
            with pytest.raises(TypeError if comm.rank == 0 else CheckpointError, match="JSON serializable"):
                e.save(tmp_path / "one", extra={"x": np.float32(1)})
            return e.train_step(*pairs(1)[0]).loss

    on_ranks(2, rank, timeout=5.0)
    assert not list(tmp_path.iterdir())


def test_partial_folders_do_not_pile_up(tmp_path: Path) -> None:
    """What killed saves left goes with the next one, whatever its name; a save under way and foreign folders stay."""
    locked, stale = tmp_path / "other.partial-0badf00d", tmp_path / "step-7.partial-00c0ffee"
    foreign = [tmp_path / name for name in ("step-7.partial-deadbeef", "my.partial-results", "step-9.replaced")]
    for folder in (locked, stale, *foreign):
        folder.mkdir()
        (folder / "state-00000-of-00001.safetensors").write_text("x")
    (foreign[0] / "notes.txt").write_text("x")
    with lock_folder(locked) as mine, alone() as comm, zx.Engine(Regressor(), comm=comm) as e:
        assert mine
        e.save(tmp_path / "step-8")
        shutil.copytree(tmp_path / "step-8", tmp_path / "step-8.replaced")  # killed before it was removed
        assert find(tmp_path).name == "step-8"
        e.save(tmp_path / "step-10")
    assert {p.name for p in tmp_path.iterdir()} == {locked.name, *(f.name for f in foreign), "step-8", "step-10"}


# ---- the command line ----


def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text("one two three four five six seven " * 40)
    return folder


def small(tmp_path: Path, *more: str) -> list[str]:
    return [
        "train", "--out", str(tmp_path / "out"), "--data", str(text_folder(tmp_path)), "--layers", "1",
        "--channels", "16", "--heads", "2", "--context", "32", "--batch", "2", "--eval-tokens", "512",
        "--eval-every", "0", "--threads", "1", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("arguments, says", [
    (["--steps", "abc"], "'abc' is no whole number"),
    (["--lr", "abc"], "'abc' is no number"),
    (["--lr", "inf"], "not a finite number"),
    (["--timeout", "inf"], "not a finite number"),
    (["--weight-decay", "-1"], "not a finite number"),
])  # fmt: skip
def test_wrong_values_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--out", "nowhere", *arguments])
    assert says in capsys.readouterr().err


def test_resume_and_folders_that_do_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Said once, before ranks are started."""
    command = small(tmp_path, "--steps", "1")
    with pytest.raises(SystemExit, match="leave --resume out"):
        main([*command, "--resume", "--ranks", "2"])
    assert main(command) == 0
    with pytest.raises(SystemExit, match="step-00000001: go on with --resume"):
        main([*command, "--ranks", "2"])
    assert "rank 1" not in capfd.readouterr().err


def test_resumed_log_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """Rows after the checkpoint are computed again, not kept twice; a row that was cut short is dropped."""
    command = small(tmp_path, "--steps", "6", "--save-every", "2", "--eval-every", "3")
    out = tmp_path / "out"

    def rows() -> list[dict[str, str]]:
        with (out / "log.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in found]

    assert main(command) == 0
    expected, summary = rows(), json.loads((out / "summary.json").read_text())
    shutil.rmtree(out / "step-00000006")  # as if killed after step 5
    with (out / "log.csv").open("a") as file:
        file.write("7,38")
    assert main([*command, "--resume"]) == 0
    assert rows() == expected and [row["step"] for row in expected] == list("123456")
    assert main([*command, "--resume"]) == 0  # nothing left to do
    again = json.loads((out / "summary.json").read_text())
    assert {**again, "loss": summary["loss"], "seconds": summary["seconds"]} == summary


def test_tokens_go_on_counting_with_other_sizes(tmp_path: Path) -> None:
    command = small(tmp_path, "--steps", "2")
    assert main(command) == 0
    command[command.index("--steps") + 1] = "4"
    assert main([*command, "--resume", "--accumulate", "3"]) == 0
    with (tmp_path / "out" / "log.csv").open(newline="") as file:
        assert [int(row["tokens"]) for row in csv.DictReader(file)] == [64, 128, 128 + 192, 128 + 384]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["tokens"] == 512


def test_ranks_that_a_launcher_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable left over from another job does not quietly make it a job of one rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(small(tmp_path, "--steps", "1", "--ranks", "2")) == 1
    assert "the launcher started 1" in capsys.readouterr().err


def test_run_starts_modules(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "1", "-m", "json.tool", "--help"]) == 0
    assert "json.tool" in capfd.readouterr().out


def test_engines_that_connect_themselves_one_after_the_other(tmp_path: Path) -> None:
    """The second meeting of a job needs no launcher's socket."""
    script = tmp_path / "two.py"
    script.write_text(
        "import numpy as np, zerox as zx\n"
        "ids = np.arange(16).reshape(1, 16)\n"
        "model = lambda: zx.models.GPT(zx.models.GPTConfig(vocab=16, context=16, layers=1, heads=1, channels=8))\n"
        "losses = []\n"
        "for _ in range(3):\n"
        "    with zx.Engine(model(), zero=3, threads=1) as e:\n"
        "        losses.append(e.train_step(ids, ids).loss)\n"
        "a, b = zx.Engine(model(), threads=1), zx.Engine(model(), zero=2, threads=1)\n"
        "losses += [a.train_step(ids, ids).loss, b.train_step(ids, ids).loss]\n"
        "assert len(set(losses)) == 1, losses\n"
    )
    command = [sys.executable, "-m", "zerox", "run", "-n", "2", str(script)]
    done = subprocess.run(
        command, env={**os.environ, "ZEROX_TIMEOUT": "10"}, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number, whom", [
    (signal.SIGTERM, "rank 1"), (signal.SIGTERM, "launcher"), (signal.SIGINT, "launcher"), (signal.SIGINT, "group"),
])  # fmt: skip
def test_a_signal_ends_all_ranks_after_the_same_step(number: int, whom: str, tmp_path: Path) -> None:
    """D15: whoever gets it, all stop after one step, with a complete checkpoint, and nobody stays behind."""
    command = [sys.executable, "-m", "zerox", *small(tmp_path, "--steps", "100000", "--ranks", "2")]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = tmp_path / "out" / "log.csv"
    deadline = time.monotonic() + LIMIT_S
    try:
        while not (log.exists() and len(log.read_text().splitlines()) > 5):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        ranks = {}
        for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks.update({v.decode().replace("RANK=", "rank "): int(pid) for v in variables if v.startswith(b"RANK=")})
        if whom == "group":
            os.killpg(job.pid, number)
        else:
            os.kill(job.pid if whom == "launcher" else ranks[whom], number)
        _, said = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, said
    newest = find(tmp_path / "out")
    rows = log.read_text().splitlines()
    assert newest.name == f"step-{int(rows[-1].split(',')[0]):08d}"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["checkpoint"] == str(newest)
    for pid in ranks.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_parameters_from_bfloat16_bits() -> None:
    """uint16 arrays are bfloat16 bits, as `read_weights` gives them, and not whole numbers."""
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        before = e.parameters()
        e.load_parameters({name: dtypes.to_bfloat16(value) for name, value in before.items()})
        for name, value in e.parameters().items():
            assert np.array_equal(value, dtypes.from_bfloat16(dtypes.to_bfloat16(before[name]))), name


def test_a_signature_that_was_not_planned_cannot_be_run() -> None:
    """Also after a dry run that was abandoned: there is no memory behind it."""
    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        for _ in range(2):
            e.core.begin(7, train=False, dry=True)
            e.core.abandon()
            with pytest.raises(zx.StateError, match="was not run dry"):
                e.core.begin(7, train=False, dry=False)


def test_a_load_that_fails_while_writing_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that vanishes after it was checked: every rank raises, and another load makes the engine whole again."""
    import zerox.checkpoint.loading as loading

    values = loading._values
    calls = itertools.count()

    def vanishing(engine: Any, *rest: Any) -> Any:
        if engine.comm.rank == 1 and next(calls) == 1:  # the second pass of rank 1
            raise FileNotFoundError("gone")
        return values(engine, *rest)

    monkeypatch.setattr(loading, "_values", vanishing)

    def rank(comm: zx.Comm) -> None:
        with zx.Engine(tiny_gpt(), comm=comm, zero=3) as e:
            e.save(tmp_path / "c")
            saved = e.parameters()
            e.train_step(random_batch(comm.rank))
            with pytest.raises((CheckpointError, OSError), match="gone"):
                e.load(tmp_path / "c")
            e.load(tmp_path / "c")
            assert all(np.array_equal(saved[n], v) for n, v in e.parameters().items())
            e.train_step(random_batch(comm.rank))

    on_ranks(2, rank, timeout=10.0)


def test_closing_with_live_views_counts_once() -> None:
    model = tiny_gpt()
    with alone() as comm:
        e = zx.Engine(model, comm=comm)
        views = e.core.acquire(0)
        with pytest.raises(BufferError):
            e.close()
        del views
        e.close()
        assert {p.engines for _, p in model.named_parameters()} == {0}
