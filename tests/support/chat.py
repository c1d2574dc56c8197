"""A tokenizer of letters with a chat template, and a target that writes with it."""

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers

from specjax.weights.tokenizer import Tokenizer
from support import toy

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?'()=+-_`\n@"
BEGIN, END = len(LETTERS), len(LETTERS) + 1  # `<u>` before a turn, `</e>` behind it
TEMPLATE = (
    "{% for m in messages %}{{ '<u>' + m.role[0] + ':' + m.content + '</e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<u>a:' }}{% endif %}"
)


def letters() -> Tokenizer:
    """One token a letter (capitals become small); a character that it lacks is `@`."""
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, [], unk_token="@"))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<u>", "</e>"])
    return Tokenizer(backend=backend, chat_template=TEMPLATE, eos_ids=(END,))


def babble(seed: int = 0, positions: int = 512) -> dict:
    """Tables for a `LookupTarget`: random letters by the last token and the position; a turn ends after 20 or so."""
    rng = np.random.default_rng(seed)
    by_token, by_position = (rng.normal(size=(n, toy.VOCAB), scale=2.0) for n in (toy.VOCAB, positions))
    by_token[:, END] += 1.0
    by_token[:, [LETTERS.index("@"), BEGIN, *range(END + 1, toy.VOCAB)]] = -30.0
    return toy.lookup(toy.VOCAB, positions, by_token=by_token, by_position=by_position)


def circles(word: str, positions: int = 512) -> dict:
    """Tables for a `LookupTarget`: the answer repeats `word`, whose letters differ, without an end."""
    by_token = np.zeros((toy.VOCAB, toy.VOCAB))
    for letter, following in zip(word, word[1:] + word[0], strict=True):
        by_token[LETTERS.index(letter), LETTERS.index(following)] = 9.0
    by_token[LETTERS.index(":"), LETTERS.index(word[0])] = 9.0
    return toy.lookup(toy.VOCAB, positions, by_token=by_token)
