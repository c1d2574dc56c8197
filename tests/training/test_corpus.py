"""The corpus: what goes in comes out, in order, whatever happens on the way."""

import dataclasses
import json
import os

import numpy as np
import pytest

from specjax.training.corpus import Corpus, Dialogue, Origin
from specjax.training.writer import Writer

ORIGIN = Origin(target="toy", target_digest="a" * 64, tokenizer_digest="b" * 64, vocab_size=50000)
RECIPE = {"seed": 1, "temperatures": [0.0, 0.7]}


def dialogue(number: int, length: int = 20) -> Dialogue:
    rng = np.random.default_rng(number)
    mask = np.zeros(length, bool)
    mask[length // 2 :] = True
    tokens = rng.integers(0, ORIGIN.vocab_size, length).astype(np.int32)
    return Dialogue(tokens, mask, temperature=0.7 * (number % 2), prompt=int(rng.integers(2**63)), number=number)


def write(path, numbers, goal=10**9, shard_tokens=50, close=True) -> Writer:
    writer = Writer(path, ORIGIN, RECIPE, goal, shard_tokens)
    for number in numbers:
        if number % 5 == 4:
            writer.drop(number, "duplicate")
        else:
            writer.add(dialogue(number))
    if close:
        writer.close()
    else:
        die(writer)
    return writer


def die(writer: Writer):
    """All that the end of a process does for a writer: its lock is gone."""
    os.close(writer._lock)


def assert_holds(corpus: Corpus, numbers):
    assert [d.number for d in corpus.dialogues] == list(numbers)
    for i, found in enumerate(corpus.dialogues):
        wanted = dialogue(found.number)
        np.testing.assert_array_equal(corpus[i][0], wanted.tokens)
        np.testing.assert_array_equal(corpus[i][1], wanted.mask)
        assert corpus[i][0].dtype == np.int32 and corpus[i][1].dtype == bool
        assert (found.temperature, found.prompt) == (wanted.temperature, wanted.prompt)


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_goes_in_comes_out(tmp_path):
    write(tmp_path / "c", range(12))
    corpus = Corpus.open(tmp_path / "c", ORIGIN)
    assert_holds(corpus, [n for n in range(12) if n % 5 != 4])
    assert (len(corpus), corpus.tokens, corpus.answer_tokens) == (10, 200, 100)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert (manifest["tried"], manifest["dropped"]) == (12, {"duplicate": 2})
    assert [shard["dialogues"] for shard in manifest["shards"]] == [3, 3, 3, 1]
    assert not list((tmp_path / "c").glob("pending*"))


def test_order_of_arrival_does_not_matter(tmp_path):
    write(tmp_path / "a", range(12))
    write(tmp_path / "b", [3, 0, 5, 1, 2, 7, 4, 6, 11, 10, 9, 8])
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("dies_after", range(1, 12))
def test_a_killed_writer_loses_nothing(tmp_path, dies_after):
    order = [3, 0, 5, 1, 2, 7, 4, 6, 11, 10, 9, 8]
    write(tmp_path / "a", order)
    write(tmp_path / "b", order[:dies_after], close=False)
    with open(tmp_path / "b" / "pending.jsonl", "a") as journal:  # as if cut while a line was written
        journal.write('{"tokens": [1, 2')
    writer = Writer(tmp_path / "b", ORIGIN, RECIPE, 10**9, shard_tokens=50)
    die(writer)
    assert all(writer.settled(number) == (number in order[:dies_after]) for number in order)
    added = [number for number in order[:dies_after] if number % 5 != 4]
    assert writer.kept() == {number: dialogue(number).prompt for number in added}
    write(tmp_path / "b", order[dies_after:])
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_killed_between_shard_and_manifest(tmp_path):
    write(tmp_path / "a", range(4))
    write(tmp_path / "b", range(2), close=False)
    (tmp_path / "b" / "shard-00000-12345678.npz").write_bytes(b"of the run that died")
    write(tmp_path / "b", range(2, 4))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_stopped_writer_leaves_no_traces(tmp_path):
    """A short shard is taken up again: stopping changes neither shards nor manifest of the whole."""
    write(tmp_path / "a", range(12))
    for numbers in ([0, 2], [1, 3, 4], [], [6, 5, 7, 8, 9], [10, 11]):
        write(tmp_path / "b", numbers)
        Corpus.open(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_two_writers_are_refused(tmp_path):
    writer = Writer(tmp_path / "c", ORIGIN, RECIPE, 100)
    with pytest.raises(ValueError, match="being written by another process"):
        Writer(tmp_path / "c", ORIGIN, RECIPE, 100)
    writer.close()
    Writer(tmp_path / "c", ORIGIN, RECIPE, 100).close()


def test_enough_is_reached_in_order(tmp_path):
    """The dialogue that reaches the goal is the last, also where later ones are finished already."""
    writer = write(tmp_path / "c", [5, 3, 1, 0, 2], goal=35)
    assert writer.done and writer.answer_tokens == 40
    assert_holds(Corpus.open(tmp_path / "c"), [0, 1, 2, 3])
    write(tmp_path / "c", [4, 5, 6], goal=60)
    assert_holds(Corpus.open(tmp_path / "c"), [0, 1, 2, 3, 5, 6])


def test_a_closed_corpus_goes_on(tmp_path):
    write(tmp_path / "c", [0, 1, 3])
    assert_holds(Corpus.open(tmp_path / "c"), [0, 1])
    write(tmp_path / "c", [2])
    assert_holds(Corpus.open(tmp_path / "c"), [0, 1, 2, 3])


def test_nothing_is_settled_twice(tmp_path):
    writer = write(tmp_path / "c", [0, 2], close=False)
    for number in (0, 2):
        with pytest.raises(ValueError, match=f"dialogue {number} is settled"):
            writer.add(dialogue(number))


@pytest.mark.parametrize("change", [{"target_digest": "c" * 64}, {"tokenizer_digest": "c" * 64}, {"vocab_size": 7}])
def test_another_target_is_refused(tmp_path, change):
    write(tmp_path / "c", range(3))
    other = dataclasses.replace(ORIGIN, target="rival", **change)
    with pytest.raises(ValueError, match=r"written by toy \(weights aaaa.*not by rival"):
        Corpus.open(tmp_path / "c", other)
    with pytest.raises(ValueError, match="written by toy .*not by rival"):
        Writer(tmp_path / "c", other, RECIPE, 100)


def test_the_same_target_by_another_name_is_taken(tmp_path):
    write(tmp_path / "c", range(3))
    assert len(Corpus.open(tmp_path / "c", dataclasses.replace(ORIGIN, target="/models/toy"))) == 3


def test_another_recipe_is_refused(tmp_path):
    write(tmp_path / "c", range(3))
    with pytest.raises(ValueError, match="seed: 1 there, 2 now; extra: None there, 3 now"):
        Writer(tmp_path / "c", ORIGIN, RECIPE | {"seed": 2, "extra": 3}, 100)


def test_foreign_and_damaged_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no corpus"):
        Corpus.open(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and holds no corpus"):
        Writer(tmp_path, ORIGIN, RECIPE, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    write(tmp_path / "c", range(3))
    (shard,) = (tmp_path / "c").glob("shard-00000-*.npz")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="npz is damaged"):
        Corpus.open(tmp_path / "c")
    shard.unlink()
    with pytest.raises(ValueError, match="is incomplete"):
        Corpus.open(tmp_path / "c")
    write(tmp_path / "d", range(3))
    manifest = tmp_path / "d" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(ValueError, match="corpus format 9, and this specjax reads 1"):
        Corpus.open(tmp_path / "d")


def test_split_is_stable():
    corpus = Corpus([dialogue(n) for n in range(200)], ORIGIN)
    train, held = corpus.split(0.2, seed=3)
    assert len(train) + len(held) == 200 and 20 < len(held) < 60
    numbers = {d.number for d in held.dialogues}
    assert numbers.isdisjoint(d.number for d in train.dialogues)
    assert numbers != {d.number for d in corpus.split(0.2, seed=4)[1].dialogues}
    grown = Corpus([dialogue(n) for n in range(300)], ORIGIN).split(0.2, seed=3)[1]
    assert {d.number for d in grown.dialogues if d.number < 200} == numbers


def test_no_side_of_a_split_is_empty():
    for n in range(30):
        train, held = Corpus([dialogue(n), dialogue(n + 100)], ORIGIN).split(0.01)
        assert len(train) == len(held) == 1
        assert [len(side) for side in Corpus([dialogue(n), dialogue(n + 100)], ORIGIN).split(0.99)] == [1, 1]
    with pytest.raises(ValueError, match="cannot be split"):
        Corpus([dialogue(0)], ORIGIN).split(0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Corpus([dialogue(0), dialogue(1)], ORIGIN).split(1.0)
