"""The decoder, however its rows come in, against one whole pass in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy, trees
from support.forward import full_forward

from specjax.cache import KVCache
from specjax.draft import chain, pack, tree
from specjax.targets import decoder
from specjax.targets.config import ConfigError

TEXT = np.random.default_rng(0).integers(0, toy.VOCAB, 40).astype(np.int32)
CHUNK = 16  # also the size of a page
KINDS = {
    "llama": {},
    "mqa-tied": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 12, "tie_word_embeddings": True},
    "qwen2-window": {"family": "qwen2", "attention_bias": True, "windows": (None, 7)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "num_heads": 6, "attention_bias": True, "output_bias": True},
    "biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True, "num_kv_heads": 4},
}
PACK = jax.jit(pack, static_argnums=(2, 3))
TREE, CHAIN = jax.jit(tree), jax.jit(chain)


@functools.cache
def model(kind):
    """A random decoder in which nothing is trivial: biases and norms are random too."""
    config = toy.tiny_config(**KINDS[kind])
    target, params = decoder.build(config, seed=3)
    leaves, structure = jax.tree.flatten(jax.device_get(params))
    rng = np.random.default_rng(1)
    leaves = [x * 8 if x.ndim > 1 else (x + rng.normal(size=x.shape) * 0.3).astype(np.float32) for x in leaves]
    return target, jax.tree.map(jnp.asarray, structure.unflatten(leaves))


@functools.cache
def whole(kind):
    target, params = model(kind)
    return full_forward(target.config, jax.device_get(params), TEXT)


@functools.partial(jax.jit, static_argnums=(0, 5))
def forward(target, params, rows, cache, committed, taps=()):
    out = target.forward(params, rows, cache, committed, taps)
    return out, target.logits(params, out.hidden)


def chunk(tokens, start, width):
    """Rows of one request, a chain: `tokens` from position `start` on, padded to `width`."""
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    draft = CHAIN(padded, np.array([len(tokens)], np.int32))
    rows = PACK(draft, np.array([start], np.int32), width, width, np.array([True]))
    return dataclasses.replace(rows, ancestors=None)


def make_cache(target, paged, dtype=jnp.float32, batch=1):
    """Room for 64 slots a request; what is not written yet is poison."""
    if paged:
        table = 1 + np.random.default_rng(2).permutation(4 * batch).reshape(batch, 4).astype(np.int32)
        cache = target.init_cache(1 + 4 * batch, 16, dtype, jnp.asarray(table))
    else:
        cache = target.init_cache(batch, 64, dtype)
    poison = tuple(jnp.full(x.shape, 1e4, dtype) for x in cache.k)
    return dataclasses.replace(cache, k=poison, v=poison)


def fill(kind, paged, count):
    """A cache that holds `TEXT[:count]`, put there in one pass."""
    target, params = model(kind)
    out, _ = forward(target, params, chunk(TEXT[:count], 0, CHUNK), make_cache(target, paged), np.array([0], np.int32))
    return out.cache


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass(kind):
    target, params = model(kind)
    rows = chunk(TEXT, 0, 40)
    out, logits = forward(target, params, rows, make_cache(target, False), np.array([0], np.int32), (0, 1))
    want, streams, cache = whole(kind)
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert logits.dtype == jnp.float32
    # Tap t is the residual stream after t layers: 0 is the embedding.
    np.testing.assert_allclose(out.taps, np.concatenate(streams[:2], axis=-1), atol=1e-5)
    for index, (k, v) in enumerate(cache):
        np.testing.assert_allclose(out.cache.k[index][0, :, :40].transpose(1, 0, 2), k, atol=1e-5)
        np.testing.assert_allclose(out.cache.v[index][0, :, :40].transpose(1, 0, 2), v, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(target.embed)(params, TEXT), params["embedding"][TEXT])


@pytest.mark.parametrize(("kind", "paged"), [("llama", False), ("qwen2-window", True)])
def test_row_by_row(kind, paged):
    target, params = model(kind)
    cache = make_cache(target, paged)
    want = whole(kind)[0]
    for i, token in enumerate(TEXT):
        out, logits = forward(target, params, chunk([token], i, 1), cache, np.array([i], np.int32))
        cache = out.cache
        np.testing.assert_allclose(logits[0], want[i], atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("kind", "paged"), [("llama", False), ("qwen2-window", True)])
def test_chunks_with_a_padded_tail(kind, paged):
    target, params = model(kind)
    cache, got = make_cache(target, paged), []
    for start in range(0, 40, CHUNK):
        part = TEXT[start : start + CHUNK]
        out, logits = forward(target, params, chunk(part, start, CHUNK), cache, np.array([start], np.int32))
        cache = out.cache
        got.append(np.asarray(logits)[: len(part)])
    want = whole(kind)[0]
    np.testing.assert_allclose(np.concatenate(got), want, atol=1e-5 * np.abs(want).max())


def tree_case(length, nodes, seed):
    """A random tree behind `TEXT[:length]`: parents, tokens, and the logits of every node from one whole pass."""
    rng = np.random.default_rng(seed)
    parents = trees.random_parents(rng, nodes)
    tokens = rng.integers(0, toy.VOCAB, nodes).astype(np.int32)
    positions = np.concatenate([np.arange(length), length + np.array(trees.depths(parents))])
    mask = np.tril(np.ones((length + nodes, length + nodes), bool))
    mask[length:, length:] = trees.visibility(parents)
    return parents, tokens, positions, mask


@pytest.mark.parametrize(("kind", "paged"), [("llama", False), ("qwen2-window", True), ("qwen3", True)])
def test_tree_rows(kind, paged):
    target, params = model(kind)
    for length in (CHUNK - 1, CHUNK, 5):
        parents, tokens, positions, mask = tree_case(length, 12, seed=length)
        draft = TREE(tokens[None], np.array([parents], np.int32), np.array([12], np.int32))
        committed = np.array([length], np.int32)
        rows = PACK(draft, committed, 12, 12, np.array([True]))
        _, logits = forward(target, params, rows, fill(kind, paged, length), committed)
        text = np.concatenate([TEXT[:length], tokens])
        want = full_forward(target.config, jax.device_get(params), text, positions, mask)[0][length:]
        np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("paged", [False, True])
def test_a_ragged_batch_is_its_requests(paged):
    """Three requests of different lengths and a row that takes no part, in one packed pass."""
    target, params = model("llama")
    starts, nodes = np.array([15, 5, 0, 16], np.int32), np.array([12, 1, 12, 7], np.int32)
    cache = make_cache(target, paged, batch=4)
    # Fill the cache as prefill does, a request at a time through its own view.
    view = jax.jit(KVCache.request)
    for b in (0, 1, 3):
        rows = chunk(TEXT[: starts[b]], 0, CHUNK)
        out, _ = forward(target, params, rows, view(cache, np.int32(b)), np.array([0], np.int32))
        cache = dataclasses.replace(out.cache, table=cache.table)
    cases = [tree_case(int(length), 12, seed=b) for b, length in enumerate(starts)]
    draft = TREE(np.stack([c[1] for c in cases]), np.array([c[0] for c in cases], np.int32), nodes)
    rows = PACK(draft, starts, 24, 12, np.array([True, True, False, True]))
    _, logits = forward(target, params, rows, cache, starts)
    for b in (0, 1, 3):
        _, tokens, positions, mask = cases[b]
        text = np.concatenate([TEXT[: starts[b]], tokens])
        want = full_forward(target.config, jax.device_get(params), text, positions, mask)[0][starts[b] :][: nodes[b]]
        got = np.asarray(logits)[int(rows.starts[b]) : int(rows.starts[b]) + nodes[b]]
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_bfloat16_one_row_is_the_first_of_two():
    target, params = model("llama")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    cache = make_cache(target, False, jnp.bfloat16)
    start = np.array([0], np.int32)
    one, one_logits = forward(target, params, chunk(TEXT[:1], 0, 1), cache, start)
    _, two_logits = forward(target, params, chunk(TEXT[:2], 0, 2), cache, start)
    assert one.hidden.dtype == one.cache.k[0].dtype == jnp.bfloat16
    assert one_logits.dtype == jnp.float32
    largest = float(jnp.max(jnp.abs(two_logits[0])))
    np.testing.assert_allclose(one_logits[0], two_logits[0], atol=largest * 2**-8)
    np.testing.assert_allclose(one_logits[0], whole("llama")[0][0], atol=largest * 2**-5)


@pytest.mark.parametrize("bad", [(2,), (-1,), (1, 0), (1, 1)])
def test_taps_that_name_no_stream_are_refused(bad):
    with pytest.raises(ValueError, match=r"ascending, distinct and in 0\.\.1"):
        decoder.check_taps(toy.tiny_config(), bad)


def test_every_stream_below_the_last_can_be_tapped():
    decoder.check_taps(toy.tiny_config(), (0, 1))
    decoder.check_taps(toy.tiny_config(), ())


def checkpoint(kind):
    """The weights of `model(kind)` under the names and in the parts of a checkpoint."""
    target, params = model(kind)
    c, params = target.config, jax.device_get(params)
    tensors = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]["weight"]}
    if not c.tie_word_embeddings:
        tensors["lm_head.weight"] = params["head"]["weight"]
    cuts = np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim
    for i, layer in params["layers"].items():
        at = f"model.layers.{i}"
        tensors[f"{at}.input_layernorm.weight"] = layer["attention_norm"]["weight"]
        tensors[f"{at}.post_attention_layernorm.weight"] = layer["mlp_norm"]["weight"]
        for name in ("q_norm", "k_norm"):
            if name in layer["attention"]:
                tensors[f"{at}.self_attn.{name}.weight"] = layer["attention"][name]["weight"]
        for part in layer["attention"]["qkv"]:
            q, k, v = np.split(layer["attention"]["qkv"][part], cuts)
            gate, up = np.split(layer["mlp"]["gate_up"][part], 2) if part in layer["mlp"]["gate_up"] else (None, None)
            named = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
            named |= {"self_attn.o_proj": layer["attention"]["out"].get(part), "mlp.gate_proj": gate, "mlp.up_proj": up}
            named["mlp.down_proj"] = layer["mlp"]["down"].get(part)
            tensors |= {f"{at}.{name}.{part}": x for name, x in named.items() if x is not None}
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_makes_the_same_decoder(kind):
    target, params = model(kind)
    loaded, weights = decoder.from_tensors(target.config, checkpoint(kind))
    assert loaded == target
    assert jax.tree.structure(weights) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, weights, params)


def test_a_checkpoint_of_another_decoder_is_refused():
    config, tensors = model("llama")[0].config, checkpoint("llama")
    narrow = tensors | {"model.layers.1.mlp.down_proj.weight": np.zeros((32, 60), np.float32)}
    with pytest.raises(ValueError, match=r"expected .*\(32, 64\).*, got .*\(32, 60\)"):
        decoder.from_tensors(config, narrow)
    missing = {name: x for name, x in tensors.items() if name != "model.norm.weight"}
    with pytest.raises((ValueError, KeyError), match=r"model\.norm\.weight"):
        decoder.from_tensors(config, missing)


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"num_heads": 3}, "cannot be shared out"), ({"head_dim": 7}, "even"), ({"windows": (None,)}, "2 layers")],
)
def test_an_impossible_architecture_is_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        toy.tiny_config(**bad)
