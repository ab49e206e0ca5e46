"""Data: nothing lost, nothing seen twice, no neighbour seen, one order for every world size, exact resume."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def load_by_file():
    """The package under test without the compiled core, which it does not need."""
    init = Path(__file__).resolve().parent.parent / "python" / "zerox" / "data" / "__init__.py"
    spec = importlib.util.spec_from_file_location("zerox_data", init, submodule_search_locations=[str(init.parent)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["zerox_data"] = module
    spec.loader.exec_module(module)
    return module


data = load_by_file()
order = sys.modules["zerox_data.order"]

MODES = ("packed", "equal")


def numbered(sizes):
    """Documents of these sizes whose tokens are 1, 2, 3, ... over all: a token names its place."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size + 1, end + 1, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]


@st.composite
def cases(draw):
    """(documents, options of a loader) with a counted target at least, sizes 0, 1 and primes included."""
    sizes = draw(st.lists(st.integers(0, 23), min_size=0, max_size=12))
    sizes.insert(draw(st.integers(0, len(sizes))), draw(st.integers(2, 40)))
    seq_len = draw(st.integers(1, min(11, sum(sizes))))
    micro_batch = draw(st.integers(1, 4))
    options = {
        "seq_len": seq_len,
        "micro_batch": micro_batch,
        "mode": draw(st.sampled_from(MODES)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.booleans()),
    }
    if options["mode"] == "packed":
        options["max_docs"] = draw(st.none() | st.integers(micro_batch, micro_batch * seq_len))
    return numbered(sizes), options


def key(batch):
    """All of a micro-batch, comparable."""
    return (
        batch.tokens.tolist(),
        batch.targets.tolist(),
        batch.cu_seqlens.tolist(),
        batch.max_seqlen,
        batch.n_docs,
        batch.n_counted,
    )


def take(loader, n):
    return [key(batch) for batch in itertools.islice(loader, n)]


def check_form(batch, loader):
    """What holds for every micro-batch, whatever is in it."""
    n = loader.micro_batch * loader.seq_len
    assert batch.tokens.dtype == batch.targets.dtype == batch.cu_seqlens.dtype == np.int32
    assert batch.tokens.shape == batch.targets.shape == (n,)
    assert batch.cu_seqlens.shape == (batch.n_docs + 1,) and batch.n_docs <= loader.max_docs
    lengths = np.diff(batch.cu_seqlens)
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] <= n
    assert (lengths > 0).all() and (lengths <= batch.max_seqlen).all() and batch.max_seqlen == loader.seq_len
    assert (batch.tokens[batch.cu_seqlens[-1] :] == 0).all()
    assert (batch.targets[batch.cu_seqlens[-1] :] == data.IGNORED).all()
    assert batch.n_counted == np.count_nonzero(batch.targets != data.IGNORED)


# ---------------------------------------------------------------------------------------- what an epoch holds


@settings(deadline=None, max_examples=300)
@given(cases())
def test_every_token_is_an_input_once_and_every_label_is_its_successor(case):
    documents, options = case
    loader = data.Loader(data.Arrays(documents), **options)
    last_tokens = {int(document[-1]) for document in documents if len(document)}
    seen = []
    counted = []
    for batch in loader.once():
        check_form(batch, loader)
        real = batch.tokens > 0
        seen += batch.tokens[real].tolist()
        for token, target in zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True):
            assert target == (data.IGNORED if token in last_tokens else token + 1)
            counted += [target] * (target != data.IGNORED)
        assert (batch.targets[~real] == data.IGNORED).all()
    everything = np.concatenate(documents)
    first_tokens = {int(document[0]) for document in documents if len(document)}
    assert sorted(seen) == everything.tolist()
    assert sorted(counted) == [t for t in everything.tolist() if t not in first_tokens]


@settings(deadline=None, max_examples=200)
@given(cases())
def test_packed_documents_hold_tokens_of_one_document_only(case):
    documents, options = case
    options["mode"] = "packed"
    owner = {int(t): d for d, document in enumerate(documents) for t in document}
    loader = data.Loader(data.Arrays(documents), **options)
    for batch in loader.once():
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            piece = batch.tokens[begin:end]
            assert len({owner[int(t)] for t in piece}) == 1
            assert (np.diff(piece) == 1).all()


def naive_packs(documents, permuted, *, seq_len, micro_batch, max_docs):
    """The rule in words: take pieces in order; cut one that does not fit; close at max_docs."""
    pieces = [document[begin : begin + seq_len] for document in documents for begin in range(0, len(document), seq_len)]
    queue = [pieces[i].tolist() for i in permuted]
    packs = []
    while queue:
        room, pack = seq_len * micro_batch, []
        while queue and room and len(pack) < max_docs:
            piece = queue.pop(0)
            pack.append(piece[:room])
            if len(piece) > room:
                queue.insert(0, piece[room:])
            room -= len(pack[-1])
        packs.append(pack)
    return packs


@settings(deadline=None, max_examples=200)
@given(cases(), st.integers(0, 5))
def test_packs_are_what_the_rule_says(case, epoch):
    documents, options = case
    options["mode"] = "packed"
    loader = data.Loader(data.Arrays(documents), **options)
    n_pieces = sum(-(-len(document) // loader.seq_len) for document in documents)
    permuted = range(n_pieces)
    if loader.shuffle:
        permuted = order.permutation(n_pieces, seed=loader.seed, epoch=epoch)
    expected = naive_packs(
        documents,
        permuted,
        seq_len=loader.seq_len,
        micro_batch=loader.micro_batch,
        max_docs=loader.max_docs,
    )
    assert loader.n_items(epoch) == len(expected)
    loader.load_state(loader.state() | {"epoch": epoch})
    for batch, pack in zip(loader, expected, strict=False):
        bounds = itertools.pairwise(batch.cu_seqlens.tolist())
        assert [batch.tokens[begin:end].tolist() for begin, end in bounds] == pack


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=200), st.integers(1, 40), st.integers(1, 9))
def test_pack_bounds_equal_the_scan_one_by_one(sizes, capacity, max_docs):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    cuts = [0]
    while cuts[-1] < offsets[-1]:
        piece = int(np.searchsorted(offsets, cuts[-1], "right")) - 1
        closed = int(offsets[min(piece + max_docs, len(sizes))])
        cuts.append(min(cuts[-1] + capacity, closed, int(offsets[-1])))
    assert order.pack_bounds(offsets, capacity=capacity, max_docs=max_docs).tolist() == cuts


def test_packing_is_invisible():
    """Case N3: [a, b, c] and [d, e] have 2 + 1 labels, none across; a lone token counts nothing."""
    source = data.Arrays([[10, 11, 12], [20, 21], [30], []])
    batch = next(data.Loader(source, seq_len=4, micro_batch=2, shuffle=False))
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 30, 0, 0]
    assert batch.targets.tolist() == [11, 12, -100, 21, -100, -100, -100, -100]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert (batch.n_docs, batch.n_counted, batch.max_seqlen) == (3, 3, 4)


def test_equal_rows_and_the_short_window():
    source = data.Arrays([[1, 2, 3, 4, 5], [6, 7]])
    batch = next(data.Loader(source, seq_len=3, micro_batch=3, mode="equal", shuffle=False))
    assert batch.tokens.reshape(3, 3).tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert batch.targets.reshape(3, 3).tolist() == [[2, 3, 4], [5, -100, 7], [-100, -100, -100]]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 9]


def test_a_cut_piece_keeps_its_label_and_goes_on_in_the_next_pack():
    source = data.Arrays([[1, 2, 3], [4, 5, 6, 7, 8, 9]])
    batches = list(data.Loader(source, seq_len=4, micro_batch=1, shuffle=False).once())
    assert [batch.tokens.tolist() for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    assert [batch.targets.tolist() for batch in batches] == [
        [2, 3, -100, 5],
        [6, 7, 8, 9],
        [-100, -100, -100, -100],
    ]
    assert [batch.cu_seqlens.tolist() for batch in batches] == [[0, 3, 4], [0, 3, 4], [0, 1]]


def test_small_documents_beyond_max_docs_close_the_pack_early():
    source = data.Arrays([[d, d + 1] for d in range(0, 14, 2)])
    loader = data.Loader(source, seq_len=4, micro_batch=2, max_docs=3, shuffle=False)
    batches = list(loader.once())
    assert [batch.n_docs for batch in batches] == [3, 3, 1]
    assert [int(batch.cu_seqlens[-1]) for batch in batches] == [6, 6, 2]
    assert loader.n_items(0) == 3 and loader.max_docs == 3


# ------------------------------------------------------------------------------------------------------ order


def test_permutation_is_pinned():
    """A saved position must mean the same with every NumPy: these numbers may never change."""
    assert order.permutation(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order.permutation(8, seed=1234567890123456789, epoch=3).tolist() == [5, 3, 7, 0, 1, 6, 4, 2]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_permutations_of_epochs_and_seeds_differ(n):
    drawn = [order.permutation(n, seed=s, epoch=e).tolist() for s, e in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 1))]
    assert all(sorted(p) == list(range(n)) for p in drawn)
    if n == 1000:
        assert len({tuple(p) for p in drawn}) == 4


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(1, 5), st.integers(1, 4))
def test_order_does_not_depend_on_the_world(case, world, steps):
    documents, options = case
    source = data.Arrays(documents)
    ranks = [data.Loader(source, **options, world=world, rank=rank) for rank in range(world)]
    together = [key(next(loader)) for _ in range(steps) for loader in ranks]
    assert together == take(data.Loader(source, **options), world * steps)
    assert len({json.dumps(loader.state()) for loader in ranks}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_world_times_accumulation_decides_the_global_batch(mode):
    source = data.Arrays(numbered([5, 1, 17, 3, 2, 9, 8]))

    def global_batches(world, accum, n_steps):
        ranks = [
            data.Loader(source, seq_len=3, micro_batch=2, mode=mode, world=world, rank=rank) for rank in range(world)
        ]
        return [
            [key(batch) for _ in range(accum) for batch in [next(loader) for loader in ranks]] for _ in range(n_steps)
        ]

    assert global_batches(1, 6, 4) == global_batches(2, 3, 4) == global_batches(3, 2, 4) == global_batches(6, 1, 4)


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(1, 5), st.integers(1, 3))
def test_whole_epochs_lose_nothing_and_end_together(case, world, epochs):
    documents, options = case
    source = data.Arrays(documents)
    ranks = [data.Loader(source, **options, world=world, rank=rank) for rank in range(world)]
    steps = {loader.micro_steps(epochs) for loader in ranks}
    assert len(steps) == 1
    (n_steps,) = steps
    seen = np.zeros(source.n_tokens + 1, np.int64)
    for loader in ranks:
        for batch in itertools.islice(loader, n_steps):
            np.add.at(seen, batch.tokens, 1)
        assert loader.epoch >= epochs and loader.micro_steps(epochs) == 0
    assert (seen[1:] >= epochs).all()
    one_less = [data.Loader(source, **options, world=world, rank=rank) for rank in range(world)]
    for loader in one_less:
        take(loader, n_steps - 1)
        assert loader.epoch < epochs and loader.micro_steps(epochs) == 1


# ----------------------------------------------------------------------------------------------------- resume


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(0, 12), st.integers(1, 3))
def test_resume_at_any_step_is_exact(case, k, world):
    documents, options = case
    for rank in range(world):
        whole = take(data.Loader(data.Arrays(documents), **options, world=world, rank=rank), k + 6)
        first = data.Loader(data.Arrays(documents), **options, world=world, rank=rank)
        take(first, k)
        saved = json.loads(json.dumps(first.state()))
        second = data.Loader(data.Arrays(documents), **options, world=world, rank=rank)
        assert second.load_state(saved) is True
        assert second.state() == first.state()
        assert take(second, 6) == whole[k:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", range(7))
def test_resume_at_an_epoch_boundary_runs_the_remaining_steps(mode, k):
    """Case D6: 6 samples, batch 2, 2 epochs = 6 steps; after k of them 6 - k are left, in the same order."""
    samples = [[10 * i + 1, 10 * i + 2] for i in range(6)]

    def loader():
        return data.Loader(data.Arrays(samples), seq_len=2, micro_batch=2, mode=mode, seed=5)

    whole = loader()
    assert whole.micro_steps(2) == 6
    expected = take(whole, 6)
    for epoch in (expected[:3], expected[3:]):
        assert sorted(token for tokens, *_ in epoch for token in tokens) == sorted(itertools.chain(*samples))
    stopped = loader()
    take(stopped, k)
    resumed = loader()
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.micro_steps(2) == 6 - k
    assert take(resumed, resumed.micro_steps(2)) == expected[k:]


@pytest.mark.parametrize("mode", MODES)
def test_resume_with_another_world_goes_on_at_the_next_sample(mode):
    """Case D14: 10 samples, 4 consumed by 2 ranks, then 1 rank: sample 4 is next, then 5 more."""
    source = data.Arrays([[i, 100] for i in range(10)])
    options = {"seq_len": 2, "micro_batch": 1, "mode": mode, "shuffle": False}
    two = [data.Loader(source, **options, world=2, rank=rank) for rank in range(2)]
    consumed = [int(next(loader).tokens[0]) for _ in range(2) for loader in two]
    assert consumed == [0, 1, 2, 3]
    assert two[0].state() == two[1].state() and two[0].items == 4
    one = data.Loader(source, **options)
    one.load_state(two[1].state())
    assert one.micro_steps(1) == 6
    assert [int(next(one).tokens[0]) for _ in range(7)] == [4, 5, 6, 7, 8, 9, 0]


def test_equal_mode_resumes_with_another_micro_batch():
    source = data.Arrays([np.arange(1, 41)])
    big = data.Loader(source, seq_len=4, micro_batch=4, mode="equal", seed=3)
    small = data.Loader(source, seq_len=4, micro_batch=2, mode="equal", seed=3)
    next(big)
    small.load_state(big.state())
    rows = [row for batch in itertools.islice(small, 2) for row in batch.tokens.reshape(2, 4).tolist()]
    assert rows == next(big).tokens.reshape(4, 4).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_other_data_is_an_error_or_a_start_at_the_beginning(mode):
    """Case D14: resuming with 3 other samples."""
    options = {"seq_len": 2, "micro_batch": 1, "mode": mode}
    old = data.Loader(data.Arrays([[i, i] for i in range(10)]), **options)
    take(old, 4)
    new = data.Loader(data.Arrays([[7, 7], [8, 8], [9, 9]]), **options)
    next(new)
    before = new.state()
    with pytest.raises(ValueError, match="allow_other_data") as error:
        new.load_state(old.state())
    for source in (old.source, new.source):
        assert repr(source.fingerprint()) in str(error.value)
    assert new.state() == before
    assert new.load_state(old.state(), allow_other_data=True) is False
    assert (new.epoch, new.items, new.micro_steps(1)) == (0, 0, 3)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"seq_len": 3}, {"micro_batch": 3}, {"max_docs": 5}, {"shuffle": False}, {"mode": "equal"}],
    ids=str,
)
def test_another_packing_is_an_error_that_names_it(change):
    source = data.Arrays([np.arange(1, 41)])
    options = {"seq_len": 4, "micro_batch": 2}
    saved = data.Loader(source, **options).state()
    with pytest.raises(ValueError, match=next(iter(change))):
        data.Loader(source, **options | change).load_state(saved)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"epoch": -1}, {"index": 10}, {"items": "0"}, {"index": None}, {"epoch": 2**70}],
    ids=str,
)
def test_a_broken_state_is_refused_and_changes_nothing(change):
    loader = data.Loader(data.Arrays([np.arange(40)]), seq_len=4, micro_batch=1)
    next(loader)
    before = loader.state()
    with pytest.raises((ValueError, TypeError)):
        loader.load_state(before | change)
    with pytest.raises(ValueError, match="not a loader state"):
        loader.load_state(None)
    assert loader.state() == before


def test_fingerprint_sees_names_order_sizes_and_content():
    documents = [[1, 2, 3], [4, 5, 6, 7]]
    prints = [
        data.Arrays(documents).fingerprint(),
        data.Arrays(documents, names=["a", "b"]).fingerprint(),
        data.Arrays(documents[::-1]).fingerprint(),
        data.Arrays([[1, 2, 3, 4], [5, 6, 7]]).fingerprint(),
        data.Arrays([[1, 2, 3], [4, 5, 6, 8]]).fingerprint(),
    ]
    assert len({json.dumps(p) for p in prints}) == len(prints)
    assert prints[0] == data.Arrays([np.array(d, np.int64) for d in documents]).fingerprint()
    large = np.arange(2_000_000) % 251
    changed = large.copy()
    changed[-1] += 1
    assert data.Arrays([large]).fingerprint() != data.Arrays([changed]).fingerprint()


# ------------------------------------------------------------------------------------------------- evaluation


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(1, 5), st.none() | st.integers(1, 60))
def test_one_pass_is_the_same_set_for_every_world(case, world, max_tokens):
    documents, options = case
    source = data.Arrays(documents)
    alone = data.Loader(source, **options)
    expected = sorted(t for batch in alone.once(max_tokens=max_tokens) for t in batch.tokens.tolist() if t)
    ranks = [data.Loader(source, **options, world=world, rank=rank) for rank in range(world)]
    for loader in ranks:
        take(loader, 1)
    before = [loader.state() for loader in ranks]
    passes = [list(loader.once(max_tokens=max_tokens)) for loader in ranks]
    assert len({len(batches) for batches in passes}) == 1
    assert sorted(t for batches in passes for batch in batches for t in batch.tokens.tolist() if t) == expected
    assert [loader.state() for loader in ranks] == before
    for batch in itertools.chain(*passes):
        check_form(batch, alone)


# ------------------------------------------------------------------------------------------------------ files


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def whole(source, doc):
    out = np.empty(source.sizes[doc], source.dtype)
    source.read(doc, 0, out)
    return out.tobytes()


def test_folder_is_listed_in_one_order_without_empty_and_hidden_files(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": b"bb",
            "a/z.txt": b"zzz",
            "a-1.txt": b"minus",
            "a/empty.txt": b"",
            ".git/objects": b"no",
            "a/__pycache__/x.pyc": b"no",
            "Z.py": b"upper",
        },
    )
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    corpus = data.Corpus(tmp_path)
    assert corpus.names == ("Z.py", "a-1.txt", "a/z.txt", "b.txt")
    assert [whole(corpus, d) for d in range(4)] == [b"upper", b"minus", b"zzz", b"bb"]
    assert corpus.vocab == 256 and corpus.n_tokens == 15
    assert data.Corpus(tmp_path, include="*.py").names == ("Z.py",)
    assert data.Corpus(tmp_path, include=["*.py", "b*"], exclude=()).names == ("Z.py", "b.txt")
    assert data.Corpus(tmp_path, exclude=["a", "dangling", ".*"]).names == ("Z.py", "a-1.txt", "b.txt")


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"odd")
    (tmp_path / "z.txt").write_bytes(b"even")
    corpus = data.Corpus(tmp_path)
    assert [whole(corpus, d) for d in range(2)] == [b"even", b"odd"]
    json.dumps(corpus.fingerprint())
    corpus.split(0.5)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_bytes_from_files_equal_bytes_from_memory(tmp_path_factory, draw):
    texts = draw.draw(st.lists(st.binary(max_size=50), min_size=1, max_size=8))
    texts.append(b"at least this")
    folder = tmp_path_factory.mktemp("corpus")
    write(folder, {f"{i:03d}": text for i, text in enumerate(texts)})
    mode = draw.draw(st.sampled_from(MODES))
    options = {"seq_len": 7, "micro_batch": 2, "mode": mode, "seed": draw.draw(st.integers(0, 9))}
    on_disk = data.Loader(data.Corpus(folder, max_open=2), **options)
    in_memory = data.Loader(data.Arrays([list(text) for text in texts]), **options)
    assert take(on_disk, 12) == take(in_memory, 12)


def test_few_files_are_open_at_a_time_and_none_after(tmp_path):
    write(tmp_path, {f"{i:03d}": b"%03d" % i for i in range(50)})

    def n_open():
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.readlink(link) for link in links if os.path.lexists(link))

    corpus = data.Corpus(tmp_path, max_open=3)
    assert n_open() == 0
    for doc in itertools.chain(range(50), range(0, 50, 7)):
        assert whole(corpus, doc) == b"%03d" % doc
        assert 1 <= n_open() <= 3
    del corpus
    assert n_open() == 0


def test_threads_share_a_corpus(tmp_path):
    write(tmp_path, {f"{i:02d}": bytes([i]) * 500 for i in range(20)})
    corpus = data.Corpus(tmp_path, max_open=1)
    wrong = []

    def reader(seed):
        for doc in np.random.default_rng(seed).integers(0, 20, 400).tolist():
            if whole(corpus, doc) != bytes([doc]) * 500:
                wrong.append(doc)

    threads = [threading.Thread(target=reader, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


@pytest.mark.parametrize(("opened_before", "size"), [(False, 10), (True, 10), (False, 65)])
def test_a_file_that_changes_is_an_error_that_names_it_and_the_position_stays(tmp_path, opened_before, size):
    path = write(tmp_path, {"text": b"x" * 64}) / "text"
    loader = data.Loader(data.Corpus(path), seq_len=16, micro_batch=1, shuffle=False)
    if opened_before:
        next(loader)
    before = loader._next
    path.write_bytes(b"x" * size)
    with pytest.raises(RuntimeError, match=rf"text had 64 bytes .* has {size}") as error:
        next(loader)
    assert str(path) in str(error.value) and loader._next == before
    path.write_bytes(b"x" * 64)
    assert next(loader).n_counted == 16


def test_the_default_corpus_is_there_and_the_same_every_time():
    corpus = data.default_corpus()
    again = data.default_corpus()
    assert corpus.n_tokens > 5_000_000
    assert corpus.fingerprint() == again.fingerprint() and corpus.names == again.names
    parts = {part for name in corpus.names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in corpus.names)
    train, valid = corpus.split()
    assert 0.02 < valid.n_tokens / corpus.n_tokens < 0.10
    assert train.n_tokens + valid.n_tokens == corpus.n_tokens


def test_reading_does_not_grow_the_process(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 131072)  # 32 MiB

    def resident_kb():
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])

    loader = data.Loader(data.Corpus(path), seq_len=1024, micro_batch=16, mode="equal")
    next(loader)
    before = resident_kb()
    assert sum(batch.n_counted for batch in loader.once()) == 2**25 - 1
    assert resident_kb() - before < 4096


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_4096_tokens_takes_less_than_a_millisecond(mode):
    train, _ = data.default_corpus().split()
    loader = data.Loader(train, seq_len=256, micro_batch=16, mode=mode)
    next(loader)
    seconds = []
    for _ in range(200):
        begin = time.perf_counter()
        next(loader)
        seconds.append(time.perf_counter() - begin)
    assert np.quantile(seconds, 0.25) < 1e-3  # the quieter quarter: the machine has other work


# ------------------------------------------------------------------------------------------------------ split


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(max_size=5), min_size=2, max_size=20, unique=True), st.floats(0.001, 0.999))
def test_split_puts_each_document_on_one_side_and_none_is_empty(names, fraction):
    source = data.Arrays(numbered([3] * len(names)), names=names)
    train, valid = source.split(fraction)
    assert train.n_docs >= 1 and valid.n_docs >= 1
    assert sorted(train.names + valid.names) == sorted(names)
    both = [whole(part, d) for part in (train, valid) for d in range(part.n_docs)]
    assert sorted(both) == sorted(whole(source, d) for d in range(source.n_docs))


def test_split_is_stable_when_documents_are_added():
    names = [f"file{i}" for i in range(1000)]
    few = data.Arrays([[1, 2]] * 500, names=names[::2]).split(0.1)[1]
    many = data.Arrays([[1, 2]] * 1000, names=names).split(0.1)[1]
    assert set(few.names) == set(many.names) & set(names[::2])
    assert 70 <= many.n_docs <= 130
    assert few.names[:3] == ("file8", "file14", "file40")


def test_split_of_one_document_takes_its_tail(tmp_path):
    path = write(tmp_path, {"text": bytes(range(100))}) / "text"
    train, valid = data.Corpus(path).split(0.1)
    assert whole(train, 0) == bytes(range(90)) and whole(valid, 0) == bytes(range(90, 100))
    batch = next(data.Loader(train, seq_len=90, micro_batch=1))
    assert batch.targets[-1] == data.IGNORED  # the next byte belongs to the validation part
    tiny = data.Arrays([[1, 2]])
    assert [part.n_tokens for part in tiny.split(0.999)] == [1, 1]
    assert [part.n_tokens for part in tiny.split(0.001)] == [1, 1]


# ----------------------------------------------------------------------------------------------------- errors


def test_missing_and_empty_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        data.Corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds 0 entries"):
        data.Corpus(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty is empty \(0 bytes\)"):
        data.Corpus(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"holds 1 entries.*matches \*\.md"):
        data.Corpus(tmp_path, include="*.md")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        data.Corpus("/dev/null")


def test_too_short_a_corpus_is_named_with_sizes(tmp_path):
    path = write(tmp_path, {"text": b"short"}) / "text"
    for mode in MODES:
        with pytest.raises(ValueError, match=r"text holds 5 tokens, less than .* 8: take seq_len <= 5"):
            data.Loader(data.Corpus(path), seq_len=8, micro_batch=1, mode=mode)
    with pytest.raises(ValueError, match="3 documents of one token each"):
        data.Loader(data.Arrays([[1], [2], [3]]), seq_len=2, micro_batch=1)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"seq_len": 0}, ValueError, "seq_len must be at least 1, not 0"),
        ({"seq_len": 2.0}, TypeError, "seq_len must be an integer"),
        ({"seq_len": True}, TypeError, "seq_len must be an integer"),
        ({"micro_batch": -1}, ValueError, "micro_batch"),
        ({"micro_batch": 2**30}, ValueError, "int32"),
        ({"mode": "pack"}, ValueError, "'packed' or 'equal'"),
        ({"mode": ["packed"]}, ValueError, "'packed' or 'equal'"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"world": 0}, ValueError, "world"),
        ({"rank": 2, "world": 2}, ValueError, r"rank must be in 0 \.\. 1, not 2"),
        ({"max_docs": 1}, ValueError, r"max_docs must be in 2 \.\. 8, not 1"),
        ({"max_docs": 9}, ValueError, "max_docs"),
        ({"mode": "equal", "max_docs": 2}, ValueError, "max_docs belongs to mode 'packed'"),
        ({"shuffle": "no"}, TypeError, "shuffle must be True or False"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, error, says):
    with pytest.raises(error, match=says):
        data.Loader(data.Arrays([np.arange(40)]), **{"seq_len": 4, "micro_batch": 2} | options)


def test_wrong_sources_are_named():
    with pytest.raises(TypeError, match="source must be a Corpus"):
        data.Loader([[1, 2, 3]], seq_len=1, micro_batch=1)
    for documents, says in (
        ([[1, -1]], "document 0 holds token ids from -1 to 1"),
        ([[1], [2**31]], "document 1"),
        ([[0.5, 1.5]], "list of integers"),
        ([[[1, 2]]], "shape"),
        ([[], []], "no tokens in 2 documents"),
        ([], "no tokens in 0 documents"),
    ):
        with pytest.raises(ValueError, match=says):
            data.Arrays(documents)
    with pytest.raises(ValueError, match=r"0 \.\. 255"):
        data.Arrays([[256]], vocab=256)
    with pytest.raises(ValueError, match="1 names were given for 2 documents"):
        data.Arrays([[1], [2]], names=["a"])
    source = data.Arrays([[1, 2, 3]])
    assert source.vocab == 4
    for fraction in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            source.split(fraction)
    with pytest.raises(ValueError, match="cannot be split"):
        data.Arrays([[1]]).split()
    with pytest.raises(IndexError, match=r"tokens 2 \.\. 4 of document 0"):
        source.read(0, 2, np.empty(2, np.int32))
