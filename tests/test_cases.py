"""Users' faults, as small inputs with right values: sharding, accumulation, clipping, recomputation, packing.

Where a case says "mean over ranks", the denominator is ranks x micro-steps: each scalar loss counts 1.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zerox as zx
from helpers import Scalars, alone, on_ranks, random_batch, tiny_gpt
from zerox import nn

STAGES = (0, 1, 2, 3)
AT = ("micro", "step")


def fixed(*values: float, trainable: bool = True) -> nn.Parameter:
    return nn.Parameter(len(values), init=nn.values(np.array(values)), trainable=trainable)


def steps(world: int, make: Any, inputs: Any, n: int = 1, *, lr: float = 1.0, **options: Any) -> dict[str, np.ndarray]:
    """n SGD steps; inputs(rank) -> list of micro-batches (tuples of arrays). Weights; all ranks agree bit for bit."""

    def rank(comm: zx.Comm) -> dict[str, np.ndarray]:
        with zx.Engine(make(), zx.SGD(lr=lr), comm=comm, **{"clip": None, **options}) as e:
            for _ in range(n):
                e.train_step(inputs(comm.rank))
            return e.parameters()

    first, *others = on_ranks(world, rank)
    for other in others:
        assert all(np.array_equal(other[k], first[k]) for k in first)
    return first


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


@pytest.mark.parametrize("zero, world", list(itertools.product(STAGES, (1, 2, 3))))
@pytest.mark.parametrize("place", ["first", "last", "alone"])
def test_a1_empty_tensors(zero: int, world: int, place: str) -> None:
    """A1: a tensor with no elements keeps its name and shape and disturbs nobody."""

    class Inner(nn.Block):
        def __init__(self) -> None:
            self.z = nn.Parameter(0, 8)

        def forward(self) -> Any:
            return self.z.sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            z = Inner() if place == "alone" else nn.Parameter(0, 8)
            if place != "last":
                self.z = z
            self.a, self.c = nn.Parameter(8, init=nn.ones), nn.Parameter(24, init=nn.ones)
            if place == "last":
                self.z = z

        def forward(self) -> Any:
            empty = self.z() if place == "alone" else self.z.sum()
            return (self.a * self.a).mean() + empty * 0.0 + (self.c * self.c).mean()

    got = steps(world, Model, lambda r: [()], lr=0.1, zero=zero)
    assert np.allclose(got["a"], 0.975) and np.allclose(got["c"], 0.991667, atol=1e-6)
    assert got["z.z" if place == "alone" else "z"].shape == (0, 8)


@pytest.mark.parametrize("zero, world", list(itertools.product(STAGES, (1, 2, 3, 4))))
def test_a2_tied_rows_of_every_rank_learn(zero: int, world: int) -> None:
    """A2: a tied table whose rows do not divide by the world: E = [0.05, 0.15, 0.25, 0.35, 0.30] after one step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.E = nn.Parameter(5, 1, init=nn.values(np.array([[0.1], [0.2], [0.3], [0.4], [0.5]])))
            self.head = self.E

        def forward(self, token: Any) -> Any:
            return nn.linear(nn.embedding(token, self.E), self.head).sum()

    got = steps(world, Model, lambda r: [(np.array([4], np.int32),)], lr=0.1, zero=zero)
    assert np.allclose(got["E"].ravel(), [0.05, 0.15, 0.25, 0.35, 0.30])
    assert np.array_equal(got["E"], got["head"])


class TwiceUsed(nn.Block):
    def __init__(self, w: nn.Parameter) -> None:
        self.w = w

    def forward(self, x: Any) -> Any:
        return self.w * x


@pytest.mark.parametrize("zero, recompute", list(itertools.product(STAGES, (False, True))))
@pytest.mark.parametrize("shared_block", [False, True])
def test_a5_parameter_used_twice(zero: int, recompute: bool, shared_block: bool) -> None:
    """A5: w = 2, L = w (w x), x = 3 and 5: the mean gradient is 16, reduced once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            w = fixed(2.0)
            self.one = TwiceUsed(w)
            self.two = self.one if shared_block else TwiceUsed(w)

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x)).sum()

    inputs = lambda rank: [(one((3.0, 5.0)[rank]),)]  # noqa: E731
    got = steps(2, Model, inputs, zero=zero, recompute=recompute)
    assert got["one.w"] == pytest.approx(2.0 - 16.0)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("reduce_at", AT)
def test_a6_ranks_run_a_module_unequally(zero: int, reduce_at: str) -> None:
    """A6: rank 0 runs it once, rank 1 three times or never: the right mean, or an error that names the module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.part = TwiceUsed(fixed(1.0))
            self.other = fixed(0.0)

        def forward(self, x: Any, factors: Any) -> Any:
            loss = self.other * 1.0
            for f in FACTORS[int(factors.shape[0])]:
                loss = loss + self.part(x) * f
            return loss.sum()

    FACTORS = {1: (2.0,), 3: (1.0, 2.0, 3.0), 2: ()}
    for second, right in ((3, 1.0 - 4.0), (2, 1.0 - 1.0)):
        try:
            got = steps(
                2,
                Model,
                lambda rank, n=second: [(one(1.0), np.zeros((1, n)[rank], np.float32))],
                zero=zero,
                reduce_at=reduce_at,
            )
        except zx.ZeroxError as error:
            assert zero == 3 or reduce_at == "micro", "only collectives that differ may be refused"
            assert "part" in str(error) or any("part" in note for note in getattr(error, "__notes__", []))
        else:
            assert got["part.w"] == pytest.approx(right)


@pytest.mark.parametrize("zero", STAGES)
def test_a9_frozen_parameters(zero: int) -> None:
    """A9: frozen parameters never move and hold no state."""
    make = lambda: Scalars(lambda m: (m.a + m.b).sum(), a=fixed(1.0), b=fixed(1.0, trainable=False))  # noqa: E731
    got = steps(2, make, lambda r: [()], n=2, lr=0.1, zero=zero)
    assert got["a"] == pytest.approx(0.8) and got["b"] == 1.0


def test_a9_freezing_takes_a_new_engine(tmp_path: Path) -> None:
    """A9: a trains in steps 1-2, b in 3-4, with a checkpoint between: 0.8 and 0.8; a flag is never ignored."""
    model = Scalars(lambda m: (m.a + m.b).sum(), a=fixed(1.0), b=fixed(1.0, trainable=False))
    with alone() as comm:
        with zx.Engine(model, zx.SGD(lr=0.1), comm=comm, zero=3) as e:
            e.train_step(), e.train_step()
            with pytest.raises(RuntimeError, match="make a new engine"):
                model.b.trainable = True
            e.save(tmp_path / "half")
        model.a.trainable, model.b.trainable = False, True
        with zx.Engine(model, zx.SGD(lr=0.1), comm=comm, zero=3, init=False) as e:
            e.load(tmp_path / "half", optimizer=False)
            e.train_step(), e.train_step()
            assert np.allclose([e.parameter("a"), e.parameter("b")], 0.8)


@pytest.mark.parametrize("cut", [[5], [1] * 5, [4, 1]])
@pytest.mark.parametrize("zero", STAGES)
def test_b1_one_denominator(cut: list[int], zero: int) -> None:
    """B1: the loss and weights do not depend on how 5 labels are cut into micro-batches."""

    def run(parts: list[int]) -> tuple[float, dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        tokens, targets = rng.integers(0, 61, 5), rng.integers(0, 61, 5)
        bounds = np.cumsum([0, *parts])
        with alone() as comm, zx.Engine(tiny_gpt(), zx.SGD(lr=0.1), comm=comm, zero=zero, clip=None) as e:
            micro = []
            for a, b in itertools.pairwise(bounds):  # every token its own document, so that cuts change no context
                cu = np.arange(b - a + 1, dtype=np.int32)
                ids = tokens[a:b].astype(np.int32)
                micro.append(zx.Batch(ids, targets[a:b].astype(np.int32), cu, 1, int(b - a), int(b - a)))
            return float(e.train_step(micro)), e.parameters()

    loss, weights = run(cut)
    whole_loss, whole = run([5])
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for name in whole:
        assert np.allclose(weights[name], whole[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("zero, reduce_at, world", list(itertools.product(STAGES, AT, (1, 2))))
def test_b3_accumulation(zero: int, reduce_at: str, world: int) -> None:
    """B3: micro-gradients 1, 2, 3, 4, lr 1: -2.5 after one step and -5.0 after two."""
    make = lambda: Scalars(lambda m, x: (m.w * x).sum(), w=fixed(0.0))  # noqa: E731
    micro = lambda r: [(one(g),) for g in (1.0, 2.0, 3.0, 4.0)]  # noqa: E731
    assert steps(world, make, micro, zero=zero, reduce_at=reduce_at)["w"] == -2.5
    assert steps(world, make, micro, n=2, zero=zero, reduce_at=reduce_at)["w"] == -5.0


@pytest.mark.parametrize("zero, reduce_at", list(itertools.product(STAGES, AT)))
def test_b4_gradient_in_some_micro_steps(zero: int, reduce_at: str) -> None:
    """B4: a gradient of 4, then none: -2; a step without any: still -2."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.p, self.q = TwiceUsed(fixed(0.0)), fixed(0.0)

        def forward(self, x: Any) -> Any:
            loss = self.q * 1.0
            return (loss + self.p(x)).sum() if x.shape[0] == 1 else loss.sum()

    four, nothing = (one(4.0),), (np.zeros(2, np.float32),)

    def rank(comm: zx.Comm) -> list[float]:
        with zx.Engine(Model(), zx.SGD(lr=1.0), comm=comm, zero=zero, reduce_at=reduce_at, clip=None) as e:
            out = []
            for micro in ([four, nothing], [nothing, nothing]):
                e.train_step(micro)
                out.append(float(e.parameter("p.w")[0]))
            return out

    assert on_ranks(2, rank)[0] == [-2.0, -2.0]


@pytest.mark.parametrize("zero, reduce_at", list(itertools.product(STAGES, AT)))
def test_b4_block_whose_output_is_not_used(zero: int, reduce_at: str) -> None:
    """A block that runs without touching the loss counts as zero on every rank: its weights stay."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.p, self.q = TwiceUsed(fixed(3.0)), fixed(1.0)

        def forward(self, x: Any) -> Any:
            self.p(x)
            return (self.q * x).sum()

    got = steps(2, Model, lambda r: [(one(2.0),)], n=2, zero=zero, reduce_at=reduce_at)
    assert got["p.w"] == 3.0 and got["q"] == 1.0 - 2 * 2.0


@pytest.mark.parametrize("zero, reduce_at", list(itertools.product(STAGES, AT)))
def test_b6_small_gradients_in_bf16(zero: int, reduce_at: str) -> None:
    """B6: one micro-gradient of 1 and 256 of 2^-9 sum to 1.5 in bf16 (a bf16 sum would stay at 1.0)."""
    make = lambda: Scalars(lambda m, x: (m.w * x).sum(), w=fixed(0.0))  # noqa: E731
    micro = [(one(1.0),)] + [(one(2.0**-9),)] * 256
    got = steps(1, make, lambda r: micro, lr=257.0, zero=zero, reduce_at=reduce_at, precision="bf16")
    assert got["w"] == -1.5


@pytest.mark.parametrize("zero", STAGES)
def test_c1_c4_c5_not_finite_is_skipped_everywhere(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1, C4, C5: inf on one rank skips the step on all; nothing is poisoned; the schedule waits; then it works."""

    def rank(comm: zx.Comm) -> None:
        schedule = zx.Schedule(warmup=10)
        make = Scalars(lambda m, x: (m.w * x).sum(), w=fixed(1.0, 1.0))
        with zx.Engine(make, zx.AdamW(lr=1.0), schedule=schedule, comm=comm, zero=zero, clip=1.0) as e:
            for _ in range(3):
                bad = np.array([np.inf if comm.rank == comm.world - 1 else 1.0, 2.0], np.float32)
                result = e.train_step(bad)
                assert not result.applied and not np.isfinite(result.norm)
            assert e.skipped == 3 and e.steps == 0 and e.schedule.factor(e.steps) == 0.1
            assert np.array_equal(e.parameter("w"), [1.0, 1.0])
            result = e.train_step(np.array([1.0, 1.0], np.float32))
            assert result.applied and e.steps == 1
            assert np.allclose(e.parameter("w"), 1.0 - 0.1, atol=1e-5)  # a first Adam step at a tenth of the rate

    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: said.append(text))
    on_ranks(4, rank)
    assert len(said) == 1 and "step 1 was skipped" in said[0] and "inf" in said[0]


@pytest.mark.parametrize("zero", STAGES)
def test_c2_norm_counts_everything_once(zero: int) -> None:
    """C2: gradients 3 and 4 give norm 5; with a tensor of gradient 12 norm 13, whatever holds what."""
    make = lambda: Scalars(lambda m, x: (m.a * x).sum(), a=fixed(0.0, 0.0, 0.0))  # noqa: E731

    def rank(comm: zx.Comm) -> tuple[float, np.ndarray]:
        with zx.Engine(make(), zx.SGD(lr=1.0), comm=comm, zero=zero, clip=1.0) as e:
            result = e.train_step(np.array([3.0, 4.0, 12.0], np.float32))
            return result.norm, e.parameter("a")

    for norm, a in on_ranks(2, rank):
        assert norm == pytest.approx(13.0)
        assert np.allclose(a, [-3 / 13, -4 / 13, -12 / 13], rtol=1e-5)


@pytest.mark.parametrize("zero, inside", list(itertools.product(STAGES, (False, True))))
def test_e3_frozen_in_a_recomputed_segment(zero: int, inside: bool) -> None:
    """E3: frozen g is there again when the segment is recomputed: dL/da = 6."""

    class Segment(nn.Block):
        def __init__(self) -> None:
            self.g = fixed(1.0, 2.0, 3.0, trainable=False)
            self.a = fixed(2.0) if inside else None

        def forward(self, x: Any, a: Any) -> Any:
            return (self.g * x) * (self.a if inside else a)

    class Model(nn.Module):
        def __init__(self) -> None:
            self.segment = Segment()
            self.a = None if inside else fixed(2.0)

        def forward(self, x: Any) -> Any:
            return self.segment(x, self.a).sum()

    got = steps(2, Model, lambda r: [(np.ones(3, np.float32),)], zero=zero, recompute=True)
    assert got["segment.a" if inside else "a"] == pytest.approx(2.0 - 6.0)


@pytest.mark.parametrize("zero", STAGES)
def test_e4_segment_whose_input_needs_no_gradient(zero: int) -> None:
    """E4: constant x = 3 into a recomputed segment with trainable w: dL/dw = 3."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.segment = TwiceUsed(fixed(1.0))

        def forward(self, x: Any) -> Any:
            return self.segment(x).sum()

    got = steps(2, Model, lambda r: [(one(3.0),)], zero=zero, recompute=True)
    assert got["segment.w"] == pytest.approx(1.0 - 3.0)


def test_n3_packing_is_invisible() -> None:
    """N3: documents packed together give the logits and the loss that they give alone; also of length 1 and 0."""
    docs = [[3, 7, 9], [4, 2], [5], [], [8, 8, 1, 0]]
    packed = np.concatenate([np.array(d, np.int32) for d in docs])
    cu = np.cumsum([0, *[len(d) for d in docs]]).astype(np.int32)

    def inputs(tokens: np.ndarray, offsets: np.ndarray) -> nn.Inputs:
        from zerox.runner import positions_of

        return nn.Inputs(tokens=tokens, positions=positions_of(offsets, len(tokens)), cu_seqlens=offsets, max_seqlen=4)

    with alone() as comm, zx.Engine(tiny_gpt(), comm=comm) as e:
        together = e.logits(inputs(packed, cu))
        for d, (a, b) in zip(docs, itertools.pairwise(cu), strict=True):
            if d:
                solo = e.logits(inputs(np.array(d, np.int32), np.array([0, len(d)], np.int32)))
                assert np.allclose(together[a:b], solo, atol=1e-6)
        changed = packed.copy()
        changed[0] = 60
        other = e.logits(inputs(changed, cu))
        assert np.array_equal(other[3:], together[3:]) and not np.array_equal(other[:3], together[:3])


def test_n1_one_hot_row() -> None:
    """N1: 4,096 lookups of one row: one bit pattern in 10 runs, and right to 1e-5 against double."""
    up = np.random.default_rng(1).standard_normal((4096, 8)).astype(np.float32)
    ids = np.full(4096, 3, np.int32)
    seen = set()
    for threads in (1, 2) * 5:
        make = Scalars(lambda m, i, u: (nn.embedding(i, m.t) * u).sum(), t=nn.Parameter(5, 8))
        with alone(threads=threads) as comm, zx.Engine(make, zx.SGD(lr=1.0), comm=comm, clip=None) as e:
            e.train_step(ids, up)
            got = e.parameter("t")
        seen.add(got.tobytes())
        exact = -up.astype(np.float64).sum(axis=0)
        assert np.allclose(got[3], exact, rtol=1e-5, atol=1e-5 * np.abs(up).sum(axis=0).max() / 64)
        assert not got[[0, 1, 2, 4]].any()
    assert len(seen) == 1


def test_exception_in_forward_leaves_the_engine_as_before() -> None:
    """A user's error inside a block, in the dry run and in a real pass: the next step is what it would have been."""

    def run(fail_at: set[int]) -> list[float]:
        model = tiny_gpt()
        inner, calls = model.blocks[1].fc.forward, itertools.count()

        def forward(x: Any) -> Any:
            if next(calls) in fail_at:
                raise RuntimeError("the user's own mistake")
            return inner(x)

        model.blocks[1].fc.forward = forward
        with alone() as comm, zx.Engine(model, zx.AdamW(lr=1e-2), comm=comm, zero=3, recompute=True) as e:
            losses = []
            for s in range(6):
                while True:
                    try:
                        losses.append(float(e.train_step([random_batch(s), random_batch(50 + s)])))
                        break
                    except RuntimeError as error:
                        assert "own mistake" in str(error)
            return losses

    clean = run(set())
    assert run({0}) == clean and run({1, 4, 7, 8}) == clean


def test_misspelt_and_wrong_options() -> None:
    """L8: unknown options get a suggestion; wrong values name the option and what is possible."""
    with alone() as comm:
        for options, word in (
            ({"recomputee": True}, "recompute"),
            ({"zeero": 3}, "zero"),
            ({"zero": 4}, "0, 1, 2, 3"),
            ({"zero": "2"}, "zero"),
            ({"precision": "fp8"}, "bf16"),
            ({"clip": -1.0}, "clip"),
            ({"slots": 0}, "slots"),
        ):
            with pytest.raises((TypeError, ValueError), match=word):
                zx.Engine(tiny_gpt(), comm=comm, **options)


def test_two_engines_on_one_comm() -> None:
    """Teacher and student: engines of one communicator take turns, and each gives the numbers that it gives alone."""

    def run(small: bool, large: bool) -> list[list[float]]:
        with alone() as comm:
            shapes = [{"layers": 1, "channels": 8}, {"layers": 2, "channels": 32}]
            wanted = [small, large]
            engines = [
                zx.Engine(tiny_gpt(**s), comm=comm, zero=3) if w else None for s, w in zip(shapes, wanted, strict=True)
            ]
            losses: list[list[float]] = [[], []]
            for step in range(3):
                for i, e in enumerate(engines):
                    if e:
                        losses[i].append(float(e.train_step(random_batch(step, rows=1 + 3 * i))))
            for e in engines:
                if e:
                    e.close()
            return losses

    both = run(True, True)
    assert both == [run(True, False)[0], run(False, True)[1]]
