"""Samples by global index: each once per epoch, the same for every layout, the same after a resume."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from titan.grammar.catalogue import CATALOGUE
from titan.grammar.diagnostics import TitanError
from titan.runtime.corpus import read_corpus
from titan.runtime.data import (
    IGNORED,
    FileSource,
    SyntheticSource,
    cache_folder,
    check_data,
    hash_places,
    open_data,
    open_validation,
)
from titan.runtime.permutation import GOLDEN, derive_key, mix, permute
from titan.runtime.prepare import prepare
from titan.runtime.tokenfile import TokenWriter, open_tokens
from titan.runtime.tokenizer import load_tokenizer

SEQUENCE = 8


@pytest.fixture
def counting(tmp_path: Path) -> FileSource:
    """A file in which token k is k: 50 samples of 8 tokens and a rest."""
    with TokenWriter(tmp_path / "counting.tokens", 1000, "byte") as writer:
        writer.append(list(range(406)))
        writer.publish()
    return FileSource(open_tokens(tmp_path / "counting.tokens"), SEQUENCE, seed=3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "titan"


def code_of(description: str, root: Path) -> str:
    with pytest.raises(TitanError) as caught:
        open_data(description, root, SEQUENCE)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in CATALOGUE
    return diagnostic.code


# --- the order


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5, 7, 64, 65, 1000))
def test_permutation_visits_everything_once(count: int) -> None:
    for key in range(3):
        assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


@settings(deadline=None)
@given(st.integers(1, 1 << 60), st.integers(0, (1 << 64) - 1), st.data())
def test_permutation_of_huge_ranges_stays_inside_and_apart(count: int, key: int, data: st.DataObject) -> None:
    one, two = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    images = permute(one, count, key), permute(two, count, key)
    assert all(0 <= image < count for image in images)
    assert (images[0] == images[1]) == (one == two)


def test_permutation_is_even_over_keys() -> None:
    """Where element 0 of 10 goes and which pairs follow each other, over 5,000 keys: chi-squared at the 1e-6 level."""
    keys = range(5000)
    places = Counter(permute(0, 10, derive_key(9, key)) for key in keys)
    assert sum((places[i] - 500) ** 2 / 500 for i in range(10)) < 46  # 9 degrees of freedom
    pairs = Counter((permute(3, 5, derive_key(9, key)), permute(4, 5, derive_key(9, key))) for key in keys)
    expected = [pairs[pair] for pair in itertools.permutations(range(5), 2)]
    assert sum((n - 250) ** 2 / 250 for n in expected) < 68  # 19 degrees of freedom


def test_every_sample_once_per_epoch_and_another_order_in_the_next(counting: FileSource) -> None:
    assert counting.samples == (406 - 1) // SEQUENCE == 50
    epochs = [[counting.locate(i) for i in range(e * 50, e * 50 + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(50))


def test_order_depends_on_the_seed_only(counting: FileSource) -> None:
    def order(seed: int | None) -> list[int]:
        source = FileSource(counting.file, SEQUENCE, seed)
        return [source.locate(i) for i in range(60)]

    assert order(3) == [counting.locate(i) for i in range(60)]
    assert order(3) != order(4)
    assert order(None) == [*range(50), *range(10)]


# --- the samples


def test_labels_are_the_next_tokens(counting: FileSource) -> None:
    for index in (0, 49, 50, 12345):
        tokens, labels = counting.sample(index)
        first = counting.locate(index) * SEQUENCE
        assert tokens.tolist() == list(range(first, first + SEQUENCE))
        assert labels.tolist() == list(range(first + 1, first + SEQUENCE + 1))
        assert tokens.dtype == labels.dtype == torch.int64


def test_slices_are_slices_of_the_whole(counting: FileSource) -> None:
    indices = [5, 99, 0]
    whole = counting.load(indices, 0, SEQUENCE)
    for start, stop in ((0, 4), (4, 8), (3, 3), (1, 7)):
        for part, full in zip(counting.load(indices, start, stop), whole, strict=True):
            assert part.is_contiguous() and torch.equal(part, full[:, start:stop])
    for start, stop in ((0, 9), (-1, 2), (5, 4)):
        with pytest.raises(ValueError):
            counting.load(indices, start, stop)
    with pytest.raises(ValueError):
        counting.load([-1], 0, 1)


def rows_of_step(source: FileSource, step: int, data: int, micro_batch: int, context: int) -> Counter[tuple[int, ...]]:
    """What all ranks of a (data, context) layout read in a step, put together again."""
    batch, length = 12, SEQUENCE // context
    rows: Counter[tuple[int, ...]] = Counter()
    for i, d in itertools.product(range(batch // (data * micro_batch)), range(data)):
        indices = [step * batch + (i * data + d) * micro_batch + b for b in range(micro_batch)]
        parts = [torch.stack(source.load(indices, c * length, (c + 1) * length)) for c in range(context)]
        tokens, labels = torch.cat(parts, dim=2)
        rows.update(tuple(row) for row in torch.cat([tokens, labels], dim=1).tolist())
    return rows


@pytest.mark.parametrize("step", (0, 4, 1000))
def test_every_layout_reads_the_same_batch(counting: FileSource, step: int) -> None:
    reference = rows_of_step(counting, step, data=1, micro_batch=12, context=1)
    assert reference.total() == 12
    for data, micro_batch, context in ((1, 1, 1), (2, 3, 1), (3, 2, 2), (4, 3, 4), (6, 1, 8), (12, 1, 2)):
        assert rows_of_step(counting, step, data, micro_batch, context) == reference


@pytest.mark.parametrize("data", (1, 2, 4, 6))
def test_S_RES_01_S_RES_02_resume_with_any_data_size_goes_on_with_the_next_sample(
    counting: FileSource, data: int
) -> None:
    """Steps 6 to 10 of a run with data = 3 equal those of a run that starts at step 6 with another data size."""
    unbroken = [rows_of_step(counting, step, data=3, micro_batch=2, context=1) for step in range(11)]
    reopened = FileSource(open_tokens(counting.file.path), SEQUENCE, seed=3)
    assert [rows_of_step(reopened, step, data, 1, 1) for step in range(6, 11)] == unbroken[6:]


# --- synthetic data


def test_synthetic_hash_is_the_scalar_one() -> None:
    assert hash_places(77, 5, 9).tolist() == [mix(77 + place * GOLDEN) for place in range(5, 9)]


def test_synthetic_samples_are_pure_and_sliceable() -> None:
    source = SyntheticSource(1000, seed=1, ignore_fraction=0.3)
    tokens, labels = source.load([7, 3, 1 << 39], 0, 64)
    again = source.load([3], 16, 48)
    assert torch.equal(again[0][0], tokens[1, 16:48]) and torch.equal(again[1][0], labels[1, 16:48])
    counted = labels[:, :-1] != IGNORED
    assert torch.equal(labels[:, :-1][counted], tokens[:, 1:][counted])
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(SyntheticSource(1000, seed=2).load([7], 0, 64)[0][0], tokens[0])
    assert tokens.min() >= 0 and tokens.max() < 1000


def test_synthetic_tokens_are_uniform_and_labels_ignored_at_the_asked_rate() -> None:
    tokens, labels = SyntheticSource(16, ignore_fraction=0.25).load(range(200), 0, 100)
    share = (labels == IGNORED).double().mean().item()
    assert share == pytest.approx(0.25, abs=6 * math.sqrt(0.25 * 0.75 / 20_000))
    assert len(set((labels != IGNORED).sum(dim=1).tolist())) > 5  # samples differ in what counts
    counts = torch.bincount(tokens.flatten(), minlength=16).double()
    assert float(((counts - 1250) ** 2 / 1250).sum()) < 61  # chi-squared, 15 degrees of freedom, 1e-6 level
    assert not (SyntheticSource(16).load(range(5), 0, 100)[1] == IGNORED).any()


# --- what a spec names


def test_names(tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("To be or not to be\n" * 200)
    prepare([text], tmp_path / "a.tokens", "byte", 0.1)
    for description in ('tokens("a.tokens")', "tokens('a.tokens')", "a.tokens", str(tmp_path / "a.tokens")):
        source, held_out = (
            open_data(description, tmp_path, SEQUENCE, 1),
            open_validation(description, tmp_path, SEQUENCE),
        )
        assert held_out is not None and source.vocabulary == 257
        assert source.tokens + held_out.tokens == 200 * 19 + 1
    prepare([text], tmp_path / "b.tokens", "byte")
    assert open_validation("b.tokens", tmp_path, SEQUENCE) is None
    assert open_data("synthetic( 1024 )", tmp_path, SEQUENCE).vocabulary == 1024
    for unknown in ("shakespear", "", "synthetic(0)", "synthetic(-3)", "tokens()", 'tokens("")', 'files("a.b")'):
        assert code_of(unknown, tmp_path) == "T513"
    assert code_of('shakespeare("bpe1025")', tmp_path) == "T510"
    assert code_of('tokens("b.token")', tmp_path) == "T501"
    assert code_of('tokens("a.txt")', tmp_path) == "T502"
    assert not cache.exists()


def test_shipped_corpus(tmp_path: Path, cache: Path) -> None:
    """In the shipped vocabulary; the held-out tenth is the end of the text."""
    source = open_data("shakespeare", tmp_path, 128, 1234)
    held_out = open_validation("shakespeare", tmp_path, 128)
    assert isinstance(held_out, FileSource) and source.vocabulary == held_out.vocabulary == 1024
    assert 0.09 < held_out.tokens / (source.tokens + held_out.tokens) < 0.11
    text = load_tokenizer("bpe1024").decode(held_out.file.read(0, held_out.tokens).tolist())
    assert "".join(read_corpus("shakespeare")).endswith(text)
    assert 5.5 < held_out.unigram_entropy() < 6.0
    assert sorted(cache.iterdir()) == sorted(cache.glob("shakespeare-bpe1024-*.tokens"))


def test_corpus_is_prepared_once_and_again_when_damaged(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = read_corpus("shakespeare")[:2]
    monkeypatch.setattr("titan.runtime.data.read_corpus", lambda name: works)
    open_validation('shakespeare("byte")', tmp_path, 128)
    files = sorted(cache.iterdir())
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    assert open_data('shakespeare("byte")', tmp_path, 128).vocabulary == 257 and len(files) == 2
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before
    for path in files:
        path.write_bytes(path.read_bytes()[:-2])
    open_data('shakespeare("byte")', tmp_path, 128)
    open_validation('shakespeare("byte")', tmp_path, 128)
    assert [path.read_bytes() for path in files] == [content for _, content in before]


def test_cache_falls_back_to_the_spec_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert cache_folder(tmp_path) == tmp_path / ".titan"
    with pytest.raises(TitanError, match="T515"):
        cache_folder(blocker)


def test_damaged_shipped_corpus_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lzma

    monkeypatch.setattr("titan.runtime.corpus.FOLDER", tmp_path)
    assert code_of("shakespeare", tmp_path) == "T505"
    (tmp_path / "shakespeare.txt.xz").write_bytes(lzma.compress(b"To be"))
    assert code_of("shakespeare", tmp_path) == "T505"
    (tmp_path / "shakespeare.txt.xz").write_bytes(b"To be")
    assert code_of("shakespeare", tmp_path) == "T505"


# --- what does not fit


def codes(source: FileSource, global_batch: int, vocabulary: int) -> list[str]:
    found = check_data(source, source.sequence, global_batch, vocabulary)
    assert all(diagnostic.code in CATALOGUE and diagnostic.nearest for diagnostic in found)
    return [diagnostic.code for diagnostic in found]


def test_data_that_does_not_fit_the_training_is_refused(counting: FileSource) -> None:
    assert codes(counting, 50, 1000) == []
    assert codes(counting, 50, 1024) == []
    assert codes(counting, 50, 999) == ["T506"]
    assert codes(counting, 51, 1000) == ["T507"]
    assert codes(counting, 51, 10) == ["T506", "T507"]
    assert codes(FileSource(counting.file, 405), 1, 1000) == []
    assert codes(FileSource(counting.file, 406), 1, 1000) == ["T508"]


def test_S_LAU_06_more_readers_than_data_is_said_before_the_first_step(counting: FileSource) -> None:
    (diagnostic,) = check_data(counting, SEQUENCE, 64, 1000)
    assert "data" in diagnostic.message and "64" in diagnostic.message and "50" in diagnostic.message
    assert diagnostic.nearest == ("global_batch = 50",)
