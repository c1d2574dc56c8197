"""Tiny targets: a random two-layer decoder, and a table whose next token is known by construction."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache, init
from specjax.config import DraftModelConfig, RunConfig
from specjax.draft import Rows
from specjax.engine.engine import Engine
from specjax.targets import decoder
from specjax.targets.config import DecoderConfig, RopeConfig
from specjax.targets.decoder import Output

VOCAB = 64


def tiny_config(**changes) -> DecoderConfig:
    """The handed cases' tiny target: 2 layers, width 32, 4 query and 2 key/value heads of 8, 64 tokens."""
    values = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "max_position_embeddings": 512,
        "windows": (None, None),
    }
    return DecoderConfig(**(values | changes))


@functools.cache
def tiny(scale: float = 12.0, seed: int = 0, **changes):
    """`(target, params)` with random weights, large enough that texts do not collapse to one token."""
    target, params = decoder.build(tiny_config(**dict(changes)), seed=seed)

    def widen(path, x):
        norm = any("norm" in str(key) for key in path)
        return x if norm else x * scale

    return target, jax.tree_util.tree_map_with_path(widen, params)


def run_config(**changes) -> RunConfig:
    """A small engine without a compilation cache."""
    values = {"context": 128, "prefill_chunk": 16, "compilation_cache": None, "warmup": False}
    if changes.get("draft_sampling") == "sampled":  # refused unless the configuration names a drafter that can
        values["drafter"] = DraftModelConfig(model="toy")
    return RunConfig(**(values | changes))


def engine(drafter=None, drafter_params=(), target=None, tokenizer=None, table=None, **changes) -> Engine:
    """An engine on the tiny target (or on `target = (target, params)`)."""
    model, params = target or tiny()
    return Engine(
        model,
        params,
        tokenizer=tokenizer,
        drafter=drafter,
        drafter_params=drafter_params,
        config=run_config(**changes),
        table=table,
    )


@dataclasses.dataclass(frozen=True)
class TableTarget:
    """A target whose logits depend on the last token and its position by a rule: expected tokens are known.

    Attributes:
        rule: `rule(token[N], position[N]) -> logits [N, v]`, in jnp.
        config: a decoder configuration, for the vocabulary and the end tokens.
    """

    rule: Callable
    config: DecoderConfig

    def forward(self, params, rows: Rows, cache: KVCache, committed, taps=()) -> Output:
        del params, committed
        assert not taps
        hidden = jnp.stack([rows.tokens, rows.positions], axis=-1).astype(jnp.float32)
        return Output(hidden=hidden, taps=None, cache=cache)

    def logits(self, params, hidden):
        del params
        return self.rule(hidden[:, 0].astype(jnp.int32), hidden[:, 1].astype(jnp.int32))

    def init_cache(self, pages: int, page_size: int, dtype, table=None) -> KVCache:
        return init(1, pages, 1, page_size, 2, dtype, table)


def table_target(rule: Callable, **changes) -> tuple[TableTarget, dict]:
    """`(target, params)` of a `TableTarget`."""
    return TableTarget(rule, tiny_config(**changes)), {"none": jnp.zeros((1,), jnp.float32)}


@dataclasses.dataclass(frozen=True)
class LookupTarget:
    """A target whose logits are looked up: `by_token[last token] + by_position[position of the last token]`.

    The tables are its weights, so that one compiled engine serves every table of the same size.
    """

    config: DecoderConfig

    def forward(self, params, rows: Rows, cache: KVCache, committed, taps=()) -> Output:
        del params, committed
        assert not taps
        hidden = jnp.stack([rows.tokens, rows.positions], axis=-1).astype(jnp.float32)
        return Output(hidden=hidden, taps=None, cache=cache)

    def logits(self, params, hidden):
        token, position = hidden[:, 0].astype(jnp.int32), hidden[:, 1].astype(jnp.int32)
        return params["by_token"][token] + params["by_position"][position]

    def init_cache(self, pages: int, page_size: int, dtype, table=None) -> KVCache:
        return init(1, pages, 1, page_size, 2, dtype, table)


def lookup_target(vocab: int, positions: int = 256) -> tuple[LookupTarget, dict]:
    """`(target, params)` of a `LookupTarget`, all logits 0."""
    return LookupTarget(tiny_config(vocab_size=vocab)), lookup(vocab, positions)


def lookup(vocab: int, positions: int = 256, by_token=None, by_position=None) -> dict:
    """Tables for a `LookupTarget`: rows of logits by last token, and by position from 0 on; 0 where not given."""
    tables = {"by_token": np.zeros((vocab, vocab), np.float32), "by_position": np.zeros((positions, vocab), np.float32)}
    for name, rows in (("by_token", by_token), ("by_position", by_position)):
        if rows is not None:
            tables[name][: len(rows)] = rows
    return {name: jnp.asarray(table) for name, table in tables.items()}


def favourites(vocab: int, prompt: int, tokens, gap: float = 8.0) -> np.ndarray:
    """`by_position` rows under which a prompt of `prompt` tokens is continued by `tokens`, at temperature 0."""
    rows = np.zeros((prompt + len(tokens), vocab), np.float32)
    rows[np.arange(prompt - 1, prompt - 1 + len(tokens)), tokens] = gap
    return rows
