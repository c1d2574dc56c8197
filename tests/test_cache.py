"""Writes and commits of the cache, dense and through pages, against a plain numpy cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees

from specjax import cache as kv
from specjax.draft import pack, tree

GROUPS, DIM, LAYERS = 2, 4, 2
WIDTH = 6
WRITE, COMMIT = jax.jit(kv.write), jax.jit(kv.commit)
TREE, PACK = jax.jit(tree), jax.jit(pack, static_argnums=(2, 3))


def make(batch, page_size, slots, seed=0):
    """A cache full of random numbers; `page_size` None is dense. Pages are handed out in a random order."""
    rng = np.random.default_rng(seed)
    table, pages, size = None, batch, slots
    if page_size is not None:
        columns, size = -(-slots // page_size), page_size
        pages = 1 + batch * columns
        table = jnp.asarray(1 + rng.permutation(batch * columns).reshape(batch, columns), jnp.int32)
    empty = kv.init(LAYERS, pages, GROUPS, size, DIM, jnp.float32, table)
    return jax.tree.map(lambda x: x if x is table else jnp.asarray(rng.normal(size=x.shape), jnp.float32), empty)


def view(pages, table, slots):
    """A request's slots in order, `[b, slots, g, f]`."""
    pages = np.asarray(pages)
    if table is not None:
        pages = np.stack([np.concatenate(list(pages[row]), axis=1) for row in np.asarray(table)])
    return pages.transpose(0, 2, 1, 3)[:, :slots]


def packed(lengths, committed, active, seed=0):
    rng = np.random.default_rng(seed)
    parents = jnp.array([trees.random_parents(rng, WIDTH) for _ in lengths])
    draft = TREE(jnp.zeros(parents.shape, jnp.int32), parents, jnp.array(lengths))
    count = WIDTH if len(lengths) == 1 else WIDTH * len(lengths)
    return PACK(draft, jnp.array(committed), count, WIDTH, jnp.array(active, bool))


PAGES = [None, 4, 16]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(
    ("lengths", "committed", "active"),
    [
        ([6], [0], [1]),
        ([3], [14], [1]),
        ([6], [15], [1]),
        ([6, 1, 4], [3, 15, 16], [1, 1, 1]),
        ([6, 6, 6], [10, 0, 26], [1, 0, 1]),
    ],
)
def test_write_reaches_the_live_slots_and_no_committed_one(page_size, lengths, committed, active):
    slots = 32
    cache, rows = make(len(lengths), page_size, slots), packed(lengths, committed, active)
    new = jnp.asarray(np.random.default_rng(5).normal(size=(rows.count, GROUPS, DIM)), jnp.float32)
    before = view(cache.k[0], cache.table, slots)
    after = view(WRITE(cache.k[0], new, cache.table, rows), cache.table, slots)
    for b, (n, start, on) in enumerate(zip(lengths, committed, active, strict=True)):
        live = n if on else 0
        first = int(rows.starts[b])
        np.testing.assert_array_equal(after[b, start : start + live], np.asarray(new)[first : first + live])
        np.testing.assert_array_equal(after[b, :start], before[b, :start])
        if not on:
            np.testing.assert_array_equal(after[b], before[b])


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_others_are_never_written(page_size):
    """Rows that fall past a request's pages, and padding rows, are dropped; the dummy page 0 stays as it was."""
    cache, rows = make(2, page_size, 32), packed([6, 6], [29, 30], [1, 1])
    new = jnp.full((rows.count, GROUPS, DIM), 7.0)
    after = WRITE(cache.k[0], new, cache.table, rows)
    np.testing.assert_array_equal(after[0], cache.k[0][0])
    flat = view(after, cache.table, 32)
    assert (flat[0, 29:] == 7).all()
    assert (flat[1, 30:] == 7).all()
    np.testing.assert_array_equal(flat[:, :29], view(cache.k[0], cache.table, 32)[:, :29])


@pytest.mark.parametrize("page_size", PAGES)
def test_commit_gathers_the_path(page_size):
    slots = 32
    cache = make(4, page_size, slots)
    committed = [0, 13, 15, 16]
    # The last request takes no part: its count is 0, whatever its path says.
    path, count = [[0, 2, 5], [0, 1, 2], [0, 4, 0], [0, 3, 4]], [2, 2, 1, 0]
    after = COMMIT(cache, jnp.array(committed), jnp.array(path), jnp.array(count))
    assert (after.table is None) == (page_size is None)
    for old, new in zip((*cache.k, *cache.v), (*after.k, *after.v), strict=True):
        want, got = view(old, cache.table, slots).copy(), view(new, cache.table, slots)
        for b, start in enumerate(committed):
            chosen = [start + node for node in path[b][: count[b] + 1]]
            want[b, start : start + len(chosen)] = want[b, chosen]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("page_size", PAGES)
def test_commit_of_random_paths(page_size):
    rng = np.random.default_rng(3)
    cache = make(8, page_size, 32, seed=1)
    committed = rng.integers(0, 24, 8)
    paths = [[0, *sorted(rng.choice(np.arange(1, WIDTH), 4, replace=False))] for _ in range(8)]
    count = rng.integers(0, 5, 8)
    after = COMMIT(cache, jnp.asarray(committed, jnp.int32), jnp.array(paths), jnp.asarray(count, jnp.int32))
    want, got = view(cache.v[1], cache.table, 32).copy(), view(after.v[1], cache.table, 32)
    for b in range(8):
        chosen = committed[b] + np.array(paths[b][: count[b] + 1])
        want[b, committed[b] : committed[b] + len(chosen)] = want[b, chosen]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("row", [0, 2])
def test_the_view_of_one_request_is_that_request(page_size, row):
    """Writing through `request(row)` equals writing to that row of the whole cache."""
    cache = make(3, page_size, 32)
    one = cache.request(jnp.int32(row))
    rows = packed([WIDTH], [14], [1])
    new = jnp.asarray(np.random.default_rng(2).normal(size=(WIDTH, GROUPS, DIM)), jnp.float32)
    after = view(WRITE(one.k[1], new, one.table, rows), cache.table, 32)
    want = view(cache.k[1], cache.table, 32).copy()
    want[row, 14 : 14 + WIDTH] = new
    np.testing.assert_array_equal(after, want)


def test_dense_rows_are_whole():
    assert make(2, None, 32).whole_rows
    assert make(2, 32, 32).whole_rows
    assert not make(2, 16, 32).whole_rows
    assert make(2, 16, 32).page_size == 16
