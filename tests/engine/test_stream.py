"""Streamed text through the engine: stop strings and characters that are split over tokens and rounds (C07, C21)."""

import pytest
from support import tables, toy
from support.text import byte_level, sentence_piece

from specjax.drafters.suffix import Suffix
from specjax.sampling import SamplingParams

PROMPT = [1, 0, 1]
RUNS = range(1, 13)
FOO = [b"fo", b"o\n", b"\nB", b"ar", b"x", b"y", b"z"]


def speaking(tokens: list[int], tokenizer, most: int = 12, edges: tuple[int, ...] = ()):
    """An engine whose target says `tokens` and whose drafter knows them.

    Token 0 comes from prefill. A round emits up to `most + 1` tokens, and ends behind each of the `edges` (indexes into
    `tokens`): a draft ends before the token that is then the target's own.
    """
    drafts = [-1 if i in edges else token for i, token in enumerate(tokens)]
    script = tables.scripts([drafts], most, start=len(PROMPT))
    rows = toy.favourites(tables.VOCAB, len(PROMPT), tokens)
    return tables.engine(by_position=rows, drafts=script, tokenizer=tokenizer)


def both(engine, params: SamplingParams):
    """The result, streamed and not, which must agree; and the streamed texts."""
    chunks = list(engine.stream(PROMPT, params))
    result = engine.generate(PROMPT, params)
    assert [chunk.result is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    streamed = chunks[-1].result
    assert "".join(chunk.text for chunk in chunks) == streamed.text == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == streamed.token_ids == result.token_ids
    assert streamed.finish_reason == result.finish_reason
    assert streamed.logprobs == result.logprobs
    return result, [chunk.text for chunk in chunks]


class TestStopStrings:
    """C07."""

    @pytest.mark.parametrize("most", RUNS)
    def test_match_over_two_tokens(self, most):
        engine = speaking([4, 0, 1, 2, 3, 4, 4, 4], byte_level(FOO), most)
        result, _ = both(engine, SamplingParams(max_tokens=8, stop=("\n\n",), logprobs=1))
        assert (result.text, result.token_ids, result.finish_reason) == ("xfoo", [4, 0, 1, 2], "stop")
        assert [entry.token for entry in result.logprobs] == [4, 0, 1, 2]

    def test_all_pieces_at_once(self):
        engine = speaking([4, 0, 1, 2, 3, 4, 4, 4], byte_level(FOO))
        result, texts = both(engine, SamplingParams(max_tokens=8, stop=("\n\n",)))
        assert texts == ["x", "foo"]
        assert result.spec.rounds == 1

    def test_round_edge_inside_the_stop_string(self):
        engine = speaking([0, 1, 2, 3, 4], byte_level(FOO), edges=(1,))
        result, texts = both(engine, SamplingParams(max_tokens=5, stop=("\n\n",)))
        assert texts == ["fo", "o", ""]
        assert (result.text, result.token_ids, result.finish_reason) == ("foo", [0, 1, 2], "stop")

    def test_held_text_is_released_where_the_match_fails_and_at_the_end(self):
        engine = speaking([0, 1, 3, 0, 1], byte_level(FOO), edges=(1, 2))
        result, texts = both(engine, SamplingParams(max_tokens=5, stop=("\n\n",)))
        assert texts == ["fo", "o", "\nar", "foo\n"]
        assert result.finish_reason == "length"

    @pytest.mark.parametrize("most", [1, 5, 12])
    def test_match_inside_a_long_run(self, most):
        engine = speaking([4, 4, 1, 2, *[5] * 9], byte_level(FOO), most)
        result, _ = both(engine, SamplingParams(max_tokens=13, stop=("\n\n",), logprobs=0))
        assert (result.text, result.token_ids) == ("xxo", [4, 4, 1, 2])
        assert len(result.logprobs) == 4
        assert result.spec.rounds + result.spec.accepted == 3  # what lies behind the stop counts nowhere

    @pytest.mark.parametrize("most", [1, 5, 12])
    @pytest.mark.parametrize("stop", [("zy", "yx"), ("yx", "zy")])
    def test_the_earlier_of_two_wins(self, most, stop):
        engine = speaking([4, 5, 4, 6, 5, 4], byte_level(FOO), most)
        assert both(engine, SamplingParams(max_tokens=6, stop=stop))[0].text == "x"

    @pytest.mark.parametrize("most", [1, 5, 12])
    def test_included(self, most):
        engine = speaking([0, 1, 2, 3, 4], byte_level(FOO), most)
        result, _ = both(engine, SamplingParams(max_tokens=5, stop=("\n\n",), include_stop=True))
        assert (result.text, result.token_ids) == ("foo\n\n", [0, 1, 2])


def test_a_drafter_remembers_what_the_reader_got():
    """Past responses end at the stop string, which the host alone sees, not where the round of it ended."""
    said = [4, 5, 6, 0, 1, 2, 3, 4, 5, 6]
    target, _ = toy.lookup_target(tables.VOCAB, tables.POSITIONS)
    params = toy.lookup(tables.VOCAB, tables.POSITIONS, None, toy.favourites(tables.VOCAB, len(PROMPT), said))
    engine = toy.engine(Suffix(ring=32, max_spec_factor=9), (), (target, params), byte_level(FOO))
    engine.generate(PROMPT, SamplingParams(max_tokens=len(said)))
    result = engine.generate(PROMPT, SamplingParams(max_tokens=len(said), stop=("\n\n",)))
    assert (result.text, result.token_ids) == ("xyzfoo", said[:6])
    assert result.spec.rounds < 4, "the stop came inside a round"
    remembered = engine._state.drafter.tolist()
    assert [token for token in remembered if token >= 0] == said + said[:6]


class TestCharacters:
    """C21."""

    pieces = (b" x", b"\xc4", b"\x8f", b"b", b"\xf0\x9f", b"\xa6", b"\x85", b"\xe8\xaa", b"\x9e")
    eos = len(pieces)

    @pytest.fixture
    def tokenizer(self):
        return byte_level(list(self.pieces), eos_ids=(self.eos,))

    def test_the_handed_rounds(self, tokenizer):
        engine = speaking([0, 1, 2, 3, 4, 5, 6, self.eos, 3], tokenizer, edges=(1, 4, 5))
        result, texts = both(engine, SamplingParams(max_tokens=9))
        assert texts == [" x", "", "ďb", "", "🦅"]
        assert (result.text, result.finish_reason, len(result.token_ids)) == (" xďb🦅", "stop", 8)

    @pytest.mark.parametrize("most", RUNS)
    def test_any_rounds(self, tokenizer, most):
        result, texts = both(
            speaking([0, 1, 2, 3, 4, 5, 6, self.eos, 3], tokenizer, most), SamplingParams(max_tokens=9)
        )
        assert result.text == " xďb🦅"
        assert not any("\ufffd" in text for text in texts)

    @pytest.mark.parametrize("most", [0, 1, 3])
    def test_a_character_cut_by_the_budget(self, tokenizer, most):
        result, _ = both(speaking([3, 7, 8], tokenizer, most), SamplingParams(max_tokens=2))
        assert (result.text, result.token_ids, result.finish_reason) == ("b", [3, 7], "length")
        result, _ = both(speaking([3, 7, 8], tokenizer, most), SamplingParams(max_tokens=3))
        assert result.text == "b語"

    @pytest.mark.parametrize("most", [0, 1, 3])
    def test_leading_blank(self, most):
        tokenizer = sentence_piece(["▁I", "▁see", "▁a", "n", "▁"])
        result, texts = both(speaking([0, 1, 2, 3, 4, 2], tokenizer, most), SamplingParams(max_tokens=6))
        assert result.text == tokenizer.decode(result.token_ids) == "I see an  a"
        assert texts[0] == "I"
