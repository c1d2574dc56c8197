"""Small tokenizers whose tokens are what a test says."""

import tokenizers
from tokenizers import decoders, models

from specjax.weights.tokenizer import Tokenizer


def byte_level(pieces: list[bytes], eos_ids: tuple[int, ...] = ()) -> Tokenizer:
    """A byte-level tokenizer whose token `i` is `pieces[i]`; the id after the last is the special token `<eos>`."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)}
    vocab = {"".join(shown[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend=backend, eos_ids=eos_ids)


def sentence_piece(pieces: list[str], eos_ids: tuple[int, ...] = ()) -> Tokenizer:
    """A tokenizer with SentencePiece's blanks: `▁` is one, and the first of a text is dropped."""
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend=backend, eos_ids=eos_ids)
