"""Tokens to text: characters and stop strings that are split over tokens, whatever a round emits (cases C07, C21)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specjax.engine.text import REPLACEMENT, TextStream

ROUNDS = range(1, 13)


def byte_level(pieces: list[bytes], special: str = "<eos>") -> Tokenizer:
    """A byte-level tokenizer whose token `i` is `pieces[i]`; the last id is a special token."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)}
    vocab = {"".join(shown[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special])
    return tokenizer


def sentence_piece(pieces: list[str]) -> Tokenizer:
    """A SentencePiece-like tokenizer: ▁ for blanks, byte fallback, the first blank dropped."""
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def run(stream: TextStream, rounds: list[list[int]]) -> tuple[list[str], list[int], str | None]:
    """Push round after round until the stream ends: the texts, the kept ids, the stop that matched."""
    texts, kept, stop = [], [], None
    for ids in rounds:
        delta = stream.push(ids)
        texts.append(delta.text)
        kept += delta.token_ids
        if delta.finished:
            stop = delta.stop
            break
    else:
        texts.append(stream.finish())
    return texts, kept, stop


def by(size: int, ids: list[int]) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


class TestStopStrings:
    """C07."""

    tokenizer = byte_level([b"fo", b"o\n", b"\nB", b"ar"])

    @pytest.mark.parametrize("size", ROUNDS)
    def test_match_over_two_tokens(self, size):
        texts, kept, stop = run(TextStream(self.tokenizer, ["\n\n"]), by(size, [0, 1, 2, 3]))
        assert ("".join(texts), kept, stop) == ("foo", [0, 1, 2], "\n\n")

    def test_possible_beginning_is_held_back(self):
        stream = TextStream(self.tokenizer, ["\n\n"])
        assert stream.push([0, 1]).text == "foo"
        last = stream.push([2, 3])
        assert (last.text, last.token_ids, last.finished) == ("", [2], True)

    def test_held_text_is_released_when_the_match_fails(self):
        stream = TextStream(self.tokenizer, ["\n\n"])
        assert [stream.push([i]).text for i in (0, 1, 3)] == ["fo", "o", "\nar"]

    def test_held_text_is_flushed_at_the_end(self):
        stream = TextStream(self.tokenizer, ["\n\n"])
        assert stream.push([0, 1]).text + stream.finish() == "foo\n"

    @pytest.mark.parametrize("size", ROUNDS)
    def test_match_inside_a_long_run(self, size):
        ids = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0]
        texts, kept, _ = run(TextStream(self.tokenizer, ["\n\n"]), by(size, ids))
        assert ("".join(texts), kept) == ("o", [1, 2])

    @pytest.mark.parametrize("size", ROUNDS)
    @pytest.mark.parametrize("stops", [["Bar", "\n\n"], ["\n\n", "Bar"]])
    def test_the_earlier_of_two_wins(self, size, stops):
        texts, kept, stop = run(TextStream(self.tokenizer, stops), by(size, [0, 1, 2, 3]))
        assert ("".join(texts), kept, stop) == ("foo", [0, 1, 2], "\n\n")

    @pytest.mark.parametrize("size", ROUNDS)
    def test_include_stop(self, size):
        texts, kept, _ = run(TextStream(self.tokenizer, ["\n\n"], include_stop=True), by(size, [0, 1, 2, 3]))
        assert ("".join(texts), kept) == ("foo\n\n", [0, 1, 2])

    @pytest.mark.parametrize(("stops", "text"), [(["foo", "oo"], ""), (["o", "oo"], "f"), (["fo", "foo"], "")])
    def test_overlapping_stops(self, stops, text):
        """The one complete first wins, so the result does not depend on the pieces that the text came in."""
        whole, letters = byte_level([b"foo"]), byte_level([b"f", b"o"])
        in_one = run(TextStream(whole, stops), [[0]])
        in_letters = run(TextStream(letters, stops), [[0], [1], [1]])
        assert "".join(in_one[0]) == "".join(in_letters[0]) == text
        assert in_one[2] == in_letters[2]

    @pytest.mark.parametrize("size", ROUNDS)
    def test_min_tokens(self, size):
        """A stop string completed too early is plain text; the next one counts."""
        ids = [0, 1, 2, 3, 0, 1, 2, 3]
        texts, kept, _ = run(TextStream(self.tokenizer, ["\n\n"], min_tokens=4), by(size, ids))
        assert ("".join(texts), kept) == ("foo\n\nBarfoo", ids[:7])

    def test_early_stop_in_a_piece_does_not_stop_later(self):
        stream = TextStream(byte_level([b"\n\n-\n\n", b"a"]), ["\n\n"], min_tokens=2)
        assert stream.push([0, 1]).text == "\n\n-\n\na"

    def test_early_stop_that_begins_a_longer_one(self):
        stream = TextStream(byte_level([b"ab", b"x"]), ["ab", "abc"], min_tokens=2)
        assert [stream.push([i]).text for i in (0, 1)] == ["", "abx"]

    def test_early_stop_does_not_hide_one_that_overlaps_it(self):
        stream = TextStream(byte_level([b"a"]), ["aa"], min_tokens=3)
        assert [stream.push([0]).text for _ in range(3)] == ["", "a", ""]
        assert stream.push([0]).finished

    def test_nothing_after_the_end(self):
        stream = TextStream(self.tokenizer, ["\n\n"])
        stream.push([1, 2])
        after = stream.push([0, 3])
        assert (after.text, after.token_ids, after.finished) == ("", [], True)
        assert stream.finish() == ""

    def test_empty_stop_is_refused(self):
        with pytest.raises(ValueError, match="must not be empty"):
            TextStream(self.tokenizer, ["a", ""])


class TestCharacters:
    """C21."""

    eagle = byte_level([b" x", b"\xc4", b"\x8f", b"b", b"\xf0\x9f", b"\xa6", b"\x85"])
    eos = eagle.token_to_id("<eos>")

    def test_deltas(self):
        texts, kept, _ = run(TextStream(self.eagle), [[0, 1], [2, 3, 4], [5], [6, self.eos]])
        assert texts == [" x", "ďb", "", "🦅", ""]
        assert kept == [0, 1, 2, 3, 4, 5, 6, self.eos]

    @pytest.mark.parametrize("size", ROUNDS)
    def test_cut_character_is_dropped_in_every_mode(self, size):
        tokenizer = byte_level([b"a", b"\xe8", b"\xaa", b"\x9e"])
        for cut, text in [(1, "a"), (2, "a"), (3, "a"), (4, "a語")]:
            texts, kept, _ = run(TextStream(tokenizer), by(size, [0, 1, 2, 3][:cut]))
            assert ("".join(texts), len(kept)) == (text, cut)

    def test_cut_inside_a_token_keeps_the_rest_of_it(self):
        tokenizer = byte_level([b"ab\xe8", b"\xaa\x9e!"])
        assert [TextStream(tokenizer).push(ids).text for ids in ([0], [0, 1])] == ["ab", "ab語!"]

    def test_bytes_that_are_no_character_are_shown_once_known(self):
        stream = TextStream(byte_level([b"a", b"\xff"]))
        assert [stream.push([i]).text for i in (0, 1, 1, 0)] == ["a", "", "", "\ufffd\ufffda"]

    @pytest.mark.parametrize("size", ROUNDS)
    def test_sentence_piece_blanks_and_bytes(self, size):
        tokenizer = sentence_piece(["▁Hello", "▁", "▁big", "<0xE8>", "<0xAA>", "<0x9E>", "!"])
        ids = [0, 1, 2, 3, 4, 5, 6, 2]
        texts, _, _ = run(TextStream(tokenizer), by(size, ids))
        assert "".join(texts) == tokenizer.decode(ids) == "Hello  big語! big"

    def test_byte_run_that_turns_out_invalid_does_not_raise(self):
        tokenizer = sentence_piece(["<0x41>", "<0xFF>", "b"])
        assert [TextStream(tokenizer).push(ids).text for ids in ([0], [0, 1], [0, 1, 2])] == ["A", "A", "A\ufffdb"]

    def test_special_tokens_give_no_text(self):
        assert TextStream(self.eagle).push([self.eos, 0, self.eos, 3]).text == " xb"

    def test_stop_tokens_give_no_text_unless_included(self):
        assert TextStream(self.eagle, stop_token_ids=[3]).push([0, 3]).text == " x"
        assert TextStream(self.eagle, stop_token_ids=[3], include_stop=True).push([0, 3]).text == " xb"


PIECES = [b"a", b"b", b"ab", b" a", b"\n", b"b\n", b"\xe8", b"\xaa", b"\x9e", b"a\xe8", b"\xaa\x9eb", b"\xff"]
BYTES = byte_level(PIECES)


@st.composite
def answers(draw):
    """Token ids, and the same ids split into rounds."""
    ids = draw(st.lists(st.integers(0, len(PIECES)), max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return ids, [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(answers(), st.lists(st.text("ab \n語", min_size=1, max_size=4), max_size=3), st.booleans(), st.integers(0, 8))
def test_any_split_gives_the_same(answer, stops, include_stop, min_tokens):
    ids, rounds = answer
    options = {"include_stop": include_stop, "min_tokens": min_tokens}
    texts, kept, stop = run(TextStream(BYTES, stops, **options), rounds)
    assert ("".join(texts), kept, stop) == _searched(ids, stops, include_stop, min_tokens)


def _searched(ids, stops, include_stop, min_tokens):
    """What must come out, from decoding every prefix of `ids` whole."""
    seen = ""
    for count in range(1, len(ids) + 1):
        text = BYTES.decode(ids[:count]).rstrip(REPLACEMENT)
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(seen)
        ]
        if ends and count >= min_tokens:
            end, _, stop = min(ends)
            return text[: end if include_stop else end - len(stop)], ids[:count], stop
        seen = text
    return seen, ids, None
