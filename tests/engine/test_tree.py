"""Tree drafts in the engine: what each node sees, and what is kept of an accepted path."""

import functools

import jax
import numpy as np
import pytest
from support import engines, toy
from support.forward import full_forward
from support.scripted import ScriptedChain, ScriptedTree

from specjax.config import ConfigError
from specjax.draft import ancestor_matrix, pack, tree
from specjax.engine.engine import Engine
from specjax.sampling import SamplingParams

PARENTS = [-1, 0, 0, 1, 1, 2]
PATHS = {"tree of 6 batch paged": [0, 2, 5], "tree of 17": [0, 3, 9, 13, 16]}
NEW = SamplingParams(max_tokens=24)


def test_depths_positions_and_visibility():
    draft = jax.jit(tree)(np.zeros((1, 6), np.int32), np.array([PARENTS], np.int32), np.array([6], np.int32))
    rows = jax.jit(pack, static_argnums=(2, 3))(draft, np.array([5], np.int32), 6, 6, np.array([True]))
    assert draft.depths[0].tolist() == [0, 1, 1, 2, 2, 2]
    assert rows.positions.tolist() == [5, 6, 6, 7, 7, 7]
    assert rows.slots.tolist() == [5, 6, 7, 8, 9, 10]
    seen = np.asarray(ancestor_matrix(rows.ancestors)).astype(int)
    assert ["".join(map(str, row)) for row in seen] == ["100000", "110000", "101000", "110100", "110010", "101001"]


def slots(engine: Engine, row: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of the first `count` slots of a request, layer by layer, `[count, g, f]`."""
    cache = jax.device_get(engine._state.cache)

    def read(pages):
        own = pages[row : row + 1] if cache.table is None else pages[cache.table[row]]
        return np.concatenate(list(own), axis=1)[:, :count].transpose(1, 0, 2)

    return [(read(k), read(v)) for k, v in zip(cache.k, cache.v, strict=True)]


@functools.cache
def weights():
    target, params = toy.tiny()
    return target.config, jax.device_get(params)


@pytest.mark.parametrize("length", [5, 13, 14, 15, 16, 30])
@pytest.mark.parametrize("setup", PATHS)
def test_an_accepted_path_is_contiguous_and_equal_to_a_chain(setup, length):
    """After each round the cache is what one pass over the committed tokens puts there, at page edges too."""
    config, params = weights()
    prompt = engines.prompt(length, 3)
    text = engines.solo(prompt, NEW).token_ids
    engine = engines.engine(setup, [engines.script(prompt, text)])
    depth = len(PATHS[setup]) - 1
    engine.submit(prompt, NEW)
    row, committed = 0, [*prompt, text[0]]
    for round_ in range(3):
        (_, chunk), *_ = engine.step()[-1:]
        assert chunk.token_ids == text[1 + round_ * (depth + 1) :][: depth + 1]
        committed += chunk.token_ids
        # The newest token is the next root: it has not been processed.
        _, _, cache = full_forward(config, params, committed[:-1])
        for (k, v), (want_k, want_v) in zip(slots(engine, row, len(committed) - 1), cache, strict=True):
            np.testing.assert_allclose(k, want_k, atol=1e-5 * np.abs(want_k).max())
            np.testing.assert_allclose(v, want_v, atol=1e-5 * np.abs(want_v).max())
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("setup", PATHS)
def test_drafts_that_stop_on_the_way(setup):
    """Wrong tokens at every place of the path: part of it is accepted, or nothing."""
    prompt = engines.prompt(15, 1)
    text = engines.solo(prompt, NEW).token_ids
    drafter = engines.SETUPS[setup][0]
    for every in range(1, 6):
        follows = engines.script(prompt, text, every)
        (result,) = engines.decode(engines.engine(setup, [follows]), [prompt], NEW)
        assert result.token_ids == text
        assert result.spec == engines.expected_stats(drafter, follows, prompt, text)


@pytest.mark.parametrize(
    "setup",
    [
        "tree of 6 batch paged",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("tree of 6 batch", "tree of 17 batch paged")),
    ],
)
def test_a_batch_of_trees(setup):
    """Ragged prompts, more requests than rows, greedy and sampled: every text is its own."""
    prompts = [engines.prompt(n, 3) for n in (3, 14, 16, 7, 31, 12)]
    params = [NEW, SamplingParams(max_tokens=9), SamplingParams(max_tokens=24, temperature=0.8, seed=5)] * 2
    texts = [engines.solo(p, q).token_ids for p, q in zip(prompts, params, strict=True)]
    scripts = [engines.script(p, t, every) for p, t, every in zip(prompts[:4], texts, (0, 2, 3, 1), strict=False)]
    results = engines.decode(engines.engine(setup, scripts), prompts, params)
    assert [r.token_ids for r in results] == texts
    assert results[0].spec.acceptance_length > 2
    assert results[2].spec.accepted > 0


def test_options_that_do_not_fit_are_refused_at_start():
    with pytest.raises(ConfigError, match=r"accept 'chain' takes chains only, but scripted-tree drafts trees"):
        toy.engine(ScriptedTree(), (), accept="chain")
    with pytest.raises(ConfigError, match=r"accept 'tree' takes deterministic drafts, but draft_sampling is 'sampled'"):
        toy.engine(ScriptedTree(), (), accept="tree", draft_sampling="sampled")
    with pytest.raises(ValueError, match="accept 'recursive' is for sampled drafts"):
        toy.engine(ScriptedTree(), (), accept="recursive")
    with pytest.raises(ValueError, match=r"context \(100\) must be a multiple of page_size \(16\)"):
        toy.engine(ScriptedTree(), (), context=100, page_size=16)


@pytest.mark.parametrize("drafter", [None, ScriptedChain(4), ScriptedTree()], ids=["none", "chain", "tree"])
def test_the_default_settings_start(drafter):
    assert toy.engine(drafter).programs.stage.rule == "tree"
