"""One compiled engine for every test on a table: logits, drafts and tokenizer are set before each use."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specjax.engine.engine import Engine
from support import toy
from support.scripted import ScriptedRuns

VOCAB, POSITIONS, CONTEXT, BATCH, DEPTH = 16, 128, 96, 4, 12


@functools.cache
def _engine() -> Engine:
    return toy.engine(
        ScriptedRuns(DEPTH), scripts([], 0), toy.lookup_target(VOCAB, POSITIONS), batch=BATCH, context=CONTEXT
    )


def engine(by_token=None, by_position=None, drafts=None, tokenizer=None) -> Engine:
    """The engine: 4 rows, 16 tokens, up to 12 drafts a round.

    Args:
        by_token: rows of logits by last token.
        by_position: rows of logits by position.
        drafts: what `scripts` returns; None drafts nothing.
        tokenizer: the tokenizer, if any.
    """
    shared = _engine()
    assert not shared.busy, "an earlier test has left requests behind"
    shared.params = {
        "target": toy.lookup(VOCAB, POSITIONS, by_token, by_position),
        "drafter": scripts([], 0) if drafts is None else drafts,
    }
    shared.intake = dataclasses.replace(shared.intake, tokenizer=tokenizer)
    return shared


def scripts(rows, most, start: int = 0) -> dict:
    """Drafts of each batch row: `rows[i]` from position `start` on (-1 ends a draft), at most `most` (or `most[i]`)."""
    script = np.full((BATCH, POSITIONS), -1, np.int32)
    for row, tokens in enumerate(rows):
        script[row, start : start + len(tokens)] = tokens
    return {"script": jnp.asarray(script), "most": jnp.asarray(np.broadcast_to(most, (BATCH,)), jnp.int32)}
