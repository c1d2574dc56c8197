"""Writing a corpus: what is in it follows from seed and number alone, and the mask marks what the target said."""

import collections
import dataclasses
import functools
import json
import os

import numpy as np
import pytest
from support import chat, engines, toy
from support.scripted import ScriptedChain

from specjax.cli.prompts import Conversation
from specjax.sampling import SamplingParams
from specjax.training import prompts, stems
from specjax.training.corpus import Corpus, Origin
from specjax.training.generate import DataRecipe, generate
from specjax.training.writer import Writer

RECIPE = DataRecipe(seed=1, prompt_tokens=60, answer_tokens=40, context=200)
ORIGIN = Origin(target="letters", target_digest="a", tokenizer_digest="b", vocab_size=toy.VOCAB)
GOAL = 400


@functools.cache
def engine():
    target, _ = toy.lookup_target(toy.VOCAB)
    return toy.engine(target=(target, chat.babble()), tokenizer=chat.letters(), batch=4, context=256)


def write(folder, recipe=RECIPE, goal=GOAL, held_out=frozenset(), dies_after=None):
    """Fill a corpus; `dies_after` rounds the process is as good as dead: nothing is closed."""
    rounds = 0

    def report(progress):
        nonlocal rounds
        rounds += 1
        if rounds == dies_after:
            raise Killed

    writer = Writer(folder, ORIGIN, recipe.describe(), goal, shard_tokens=250)
    try:
        progress = generate(engine(), writer, recipe, held_out, report)
    except Killed:
        os.close(writer._lock)  # all that the end of a process does for it
        raise
    writer.close()
    return progress


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    return folder, write(folder)


def text_of(dialogue, side: bool | None = None) -> str:
    tokens = dialogue.tokens if side is None else dialogue.tokens[dialogue.mask == side]
    return chat.letters().decode(tokens.tolist(), skip_special_tokens=False)


def holds(folder) -> list[tuple]:
    return [
        (d.number, d.tokens.tolist(), d.mask.tolist(), d.temperature, d.prompt) for d in Corpus.open(folder).dialogues
    ]


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_reaches_its_goal(whole):
    folder, progress = whole
    corpus = Corpus.open(folder, ORIGIN)
    last = int(corpus.dialogues[-1].mask.sum())
    assert GOAL <= corpus.answer_tokens < GOAL + last
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) > 2
    assert progress.dialogues >= len(corpus) and progress.answered >= corpus.answer_tokens
    assert progress.decoded > progress.answered  # it has written prompts too
    assert progress.tokens_per_s == progress.answered / progress.seconds
    assert not list(folder.glob("pending*"))


def test_the_mask_marks_what_the_target_wrote(whole):
    """An answer decoded alone, from the same prompt and seed, is what stands under the mask."""
    dialogues = Corpus.open(whole[0]).dialogues
    kinds = collections.Counter()
    for d in dialogues:
        start = int(np.argmax(d.mask))
        assert d.mask[start:].all() and not d.mask[:start].any()
        assert text_of(d, False).startswith("<u>u:") and text_of(d, False).endswith("</e>\n<u>a:")
        kinds[d.temperature, "</e>" in text_of(d, True)] += 1
    assert all(kinds[t, True] for t in RECIPE.temperatures)
    greedy = [d for d in dialogues if d.temperature == 0][:3]
    for d in greedy:
        start, length = int(np.argmax(d.mask)), int(d.mask.sum())
        alone = engine().generate(d.tokens[:start].tolist(), SamplingParams(max_tokens=40)).token_ids
        assert alone[:length] == d.tokens[start:].tolist()


def test_what_is_learned_is_what_is_served(whole):
    """Trap 17: a drafter that knows the corpus by heart is right in every round where its user's words are served as a
    chat, which is the default; without the template it is not.
    """
    dialogue = next(d for d in Corpus.open(whole[0]).dialogues if d.temperature == 0 and d.mask.sum() > 10)
    user = text_of(dialogue, False).removeprefix("<u>u:").removesuffix("</e>\n<u>a:")
    known = np.full((1, engines.POSITIONS), -1, np.int32)
    known[0, : len(dialogue.tokens)] = dialogue.tokens
    target = engine().target, {**engine().params["target"]}
    served = engines.narrow(toy.engine(ScriptedChain(4), known, target, tokenizer=chat.letters(), context=256))
    answer = SamplingParams(max_tokens=int(dialogue.mask.sum()))
    as_chat, raw = (served.generate(user, answer, raw=raw) for raw in (False, True))
    assert as_chat.token_ids == dialogue.tokens[dialogue.mask].tolist()
    assert as_chat.spec.accepted == as_chat.spec.drafted > 0
    assert raw.spec.accepted < raw.spec.drafted / 2


def test_prompts_begin_with_their_stems(whole):
    for d in Corpus.open(whole[0]).dialogues:
        user = text_of(d, False).removeprefix("<u>u:")
        stem = chat.letters().decode(chat.letters().encode(stems.stem(RECIPE.seed, d.number)))
        assert user.startswith(stem.strip())


@pytest.mark.parametrize("rounds", [3, 40, 90])
def test_a_killed_run_goes_on_to_the_same_corpus(whole, tmp_path, rounds):
    with pytest.raises(Killed):
        write(tmp_path / "c", dies_after=rounds)
    assert not engine().busy
    writer = Writer(tmp_path / "c", ORIGIN, RECIPE.describe(), GOAL, 250)
    before = list(writer.kept())
    os.close(writer._lock)
    second = write(tmp_path / "c")
    assert second.dialogues + len(before) >= len(holds(whole[0]))
    assert files(tmp_path / "c") == files(whole[0])
    if rounds == 90:
        assert before and second.dialogues < whole[1].dialogues  # what was there is not written again


def test_a_killed_run_remembers_its_prompts(tmp_path):
    """Greedy prompts repeat themselves: what an earlier run has kept must still count as said."""
    recipe = dataclasses.replace(RECIPE, prompt_temperature=0.0)
    whole = write(tmp_path / "a", recipe)
    assert whole.dropped["duplicate"] > 3
    for rounds in (110, 70):
        with pytest.raises(Killed):
            write(tmp_path / "b", recipe, dies_after=rounds)
    write(tmp_path / "b", recipe)
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_a_longer_run_goes_on(whole, tmp_path):
    write(tmp_path / "c", goal=150)
    write(tmp_path / "c", goal=GOAL)
    assert holds(tmp_path / "c") == holds(whole[0])


def test_another_seed_is_another_corpus(whole, tmp_path):
    write(tmp_path / "c", dataclasses.replace(RECIPE, seed=2), goal=100)
    assert not any(dialogue in holds(whole[0]) for dialogue in holds(tmp_path / "c"))


def test_held_out_prompts_are_dropped(whole, tmp_path):
    second = Corpus.open(whole[0]).dialogues[1]
    said = text_of(second, False).removeprefix("<u>u:").removesuffix("</e>\n<u>a:")
    progress = write(tmp_path / "c", goal=200, held_out=prompts.held_out([[f"  {said.upper()}?"]]))
    assert progress.dropped["held out"] == 1
    numbers = [number for number, *_ in holds(tmp_path / "c")]
    assert second.number not in numbers and len(numbers) > 2


def test_loops_are_cut(tmp_path, monkeypatch):
    monkeypatch.setitem(engine().params, "target", chat.circles("round "))
    recipe = dataclasses.replace(RECIPE, given=(Conversation(("go",)),), answer_tokens=100)
    progress = write(tmp_path / "c", recipe, goal=10**6)
    (dialogue,) = Corpus.open(tmp_path / "c").dialogues
    assert progress.looped == 1
    assert text_of(dialogue, True) == "round round round round round ro"  # LOOP_TOKENS of them


def test_given_prompts(tmp_path):
    """Several turns, system messages, duplicates, and prompts that are too long; the run ends with the prompts."""
    given = (
        Conversation(("hello there", "and now?")),
        Conversation(("Hello, there!", "and now")),
        Conversation(("sum it up",), before=({"role": "system", "content": "be brief"},)),
        Conversation(("long " * 40,)),
    )
    recipe = dataclasses.replace(RECIPE, given=given)
    progress = write(tmp_path / "c", recipe, goal=10**6)
    assert progress.dropped == {"duplicate": 1, "too long": 1}
    first, third = Corpus.open(tmp_path / "c").dialogues
    assert (first.number, first.temperature, third.number, third.temperature) == (0, 0.0, 2, 0.0)
    assert text_of(third).startswith("<u>s:be brief</e>\n<u>u:sum it up</e>\n<u>a:")
    answers = engine().generate(first.tokens[: int(np.argmax(first.mask))].tolist(), SamplingParams(max_tokens=40))
    said = chat.letters().decode(answers.token_ids, skip_special_tokens=False)
    assert said.endswith("</e>"), "the test needs an answer that ends"
    assert text_of(first).startswith(f"<u>u:hello there</e>\n<u>a:{said}\n<u>u:and now?</e>\n<u>a:")
    turns = np.flatnonzero(np.diff(first.mask, prepend=False))
    assert len(turns) == 3  # answered, then not, then answered again to the end
    assert text_of(dataclasses.replace(first, tokens=first.tokens[turns[0] : turns[1]]), None) == said


def test_impossible_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one temperature"):
        DataRecipe(temperatures=())
    with pytest.raises(ValueError, match="temperature must be"):
        DataRecipe(temperatures=(-1.0,))
    with pytest.raises(ValueError, match=r"context \(256\) is below the recipe's \(300\)"):
        write(tmp_path / "c", dataclasses.replace(RECIPE, context=300))
