"""Tree attention against a dense float64 reference with an explicit mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees

from specjax.draft import Rows, chain, pack, tree
from specjax.pallas_kernels.tree_attention import reference

POISON = 1e4
RUN = jax.jit(reference.tree_attention, static_argnames=("scale", "window", "softcap"))
# Every array of a case is made by numpy, so that a case compiles the op, the packing and nothing else.
BUILD = {True: jax.jit(chain), False: jax.jit(tree)}
PACK = jax.jit(pack, static_argnums=(2, 3))


@dataclasses.dataclass
class Case:
    """A batch of trees over a cache, as numpy arrays; `keys` and `values` are the committed slots in order."""

    rows: Rows
    parents: list[trees.Parents]
    committed: list[int]
    lengths: list[int]
    arrays: tuple
    table: np.ndarray | None
    keys: np.ndarray
    values: np.ndarray


def make(
    committed,
    lengths,
    width,
    *,
    heads=4,
    groups=2,
    dim=8,
    page_size=None,
    slots=256,
    seed=0,
    dtype=np.float32,
    chains=False,
):
    """Random trees of `lengths` nodes (0: the request takes no part) over `committed` slots; all else is poison."""
    rng = np.random.default_rng(seed)
    batch = len(committed)
    if chains:
        parents = [list(range(-1, width - 1))] * batch
        draft = BUILD[True](np.zeros((batch, width), np.int32), np.maximum(lengths, 1).astype(np.int32))
    else:
        parents = [trees.random_parents(rng, width) for _ in committed]
        tokens = np.zeros((batch, width), np.int32)
        draft = BUILD[False](tokens, np.array(parents, np.int32), np.maximum(lengths, 1).astype(np.int32))
    count = width if batch == 1 else batch * width
    rows = PACK(draft, np.array(committed, np.int32), count, width, np.array(lengths) > 0)
    if chains:
        rows = dataclasses.replace(rows, ancestors=None)
    q = rng.normal(size=(count, heads, dim)).astype(dtype)
    k, v = (rng.normal(size=(count, groups, dim)).astype(dtype) for _ in range(2))
    keys, values = (rng.normal(size=(batch, slots, groups, dim)).astype(dtype) for _ in range(2))
    for b, length in enumerate(committed):
        keys[b, length:] = POISON
        values[b, length:] = POISON
    table, pages = None, [x.transpose(0, 2, 1, 3) for x in (keys, values)]
    if page_size is not None:
        columns = -(-slots // page_size)
        table = 1 + rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
        for i, x in enumerate(pages):
            cut = x.reshape(batch, groups, columns, page_size, dim).transpose(0, 2, 1, 3, 4)
            pages[i] = np.full((1 + batch * columns, groups, page_size, dim), POISON, dtype)
            pages[i][table] = cut
    return Case(rows, parents, committed, lengths, (q, k, v, *pages), table, keys, values)


def run(case, scale, **options):
    committed = np.array(case.committed, np.int32)
    out = RUN(*case.arrays, case.table, committed, case.rows, scale=scale, **options)
    assert out.dtype == case.arrays[0].dtype
    return np.asarray(out, np.float32)


def dense(case, scale, window=None, softcap=None):
    """Float64 attention of the live rows, one at a time over the whole context: `(packed index, output)` pairs."""
    q, k, v = (np.asarray(x, np.float64) for x in case.arrays[:3])
    ratio = q.shape[1] // k.shape[1]
    for b, (length, live) in enumerate(zip(case.committed, case.lengths, strict=True)):
        first = int(case.rows.starts[b])
        own = slice(first, first + live)
        positions = np.concatenate([np.arange(length), length + np.array(trees.depths(case.parents[b])[:live])])
        mask = np.concatenate([np.ones((live, length), bool), trees.visibility(case.parents[b])[:live, :live]], axis=1)
        if window is not None:
            mask &= positions > positions[length:, None] - window
        keys = np.concatenate([np.asarray(case.keys[b, :length], np.float64), k[own]]).repeat(ratio, axis=1)
        values = np.concatenate([np.asarray(case.values[b, :length], np.float64), v[own]]).repeat(ratio, axis=1)
        s = np.einsum("nhf,jhf->nhj", q[own], keys) * scale
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        s = np.where(mask[:, None], s, -np.inf)
        weights = np.exp(s - s.max(-1, keepdims=True))
        yield own, np.einsum("nhj,jhf->nhf", weights / weights.sum(-1, keepdims=True), values)


def check(case, tolerance=2e-5, scale=0.35, **options):
    got = run(case, scale, **options)
    assert np.isfinite(got).all()
    for own, want in dense(case, scale, **options):
        np.testing.assert_allclose(got[own], want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rows", [2, 33, 128])
def test_random_trees_of_one_request(rows):
    for seed, committed in enumerate([0, 1, 5, 100]):
        check(make([committed], [rows], rows, seed=seed))
    check(make([17], [rows // 2], rows, seed=9))  # the other half is padding


# Lengths on and around the edges of blocks (128, 256), of pages (16, 64) and of nothing; the batch is ragged and one
# request takes no part.
EDGES = [[0, 15, 16, 17], [63, 64, 65, 1], [255, 256, 257, 0], [511, 512, 31, 48], [128, 127, 500, 129]]
RAGGED = [[5, 1, 7, 3], [7, 7, 7, 7], [1, 6, 0, 2], [0, 4, 1, 7], [2, 7, 5, 0]]


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("window", [None, 24])
def test_ragged_batches_around_block_and_page_edges(page_size, window):
    for seed, (committed, lengths) in enumerate(zip(EDGES, RAGGED, strict=True)):
        check(make(committed, lengths, 7, page_size=page_size, slots=768, seed=seed), window=window)


@pytest.mark.parametrize("page_size", [None, 64])
def test_a_batch_of_trees_with_two_words_of_ancestors(page_size):
    check(make([3, 64, 130], [40, 17, 33], 40, page_size=page_size))


@pytest.mark.parametrize(("heads", "groups", "dim"), [(8, 8, 16), (8, 1, 64), (14, 2, 80), (3, 1, 128)])
def test_head_ratios_and_widths(heads, groups, dim):
    check(make([40, 3], [6, 4], 6, heads=heads, groups=groups, dim=dim, page_size=16), scale=dim**-0.5)


@pytest.mark.parametrize(("window", "softcap"), [(None, 5.0), (8, 5.0), (1, None)])
def test_windows_and_softcap(window, softcap):
    """A window shorter than the tree cuts ancestors too; a window of one sees the row alone."""
    check(make([20, 9], [12, 12], 12, seed=4), window=window, softcap=softcap, scale=1.5)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_rows_without_ancestor_words_are_a_chain(page_size, window):
    check(make([16, 0, 31], [6, 4, 0], 6, page_size=page_size, chains=True), window=window)
    check(make([33], [6], 6, page_size=page_size, chains=True), window=window)


@pytest.mark.parametrize("page_size", [None, 16])
def test_bfloat16(page_size):
    check(make([40, 17], [6, 5], 6, page_size=page_size, dtype=jnp.bfloat16), tolerance=2e-2)


def test_every_ancestor_bit_counts():
    """Sabotage: one flipped bit, of an ancestor or of a stranger, changes its row and no other."""
    case = make([5], [8], 8, seed=2)
    before = run(case, 0.35)
    rng = np.random.default_rng(0)
    for node, other in [(7, 0), (7, 6), *((int(i), int(rng.integers(0, i))) for i in rng.integers(1, 8, 6))]:
        bits = np.array(case.rows.ancestors)
        bits[node, 0] ^= 1 << other
        sabotaged = dataclasses.replace(case, rows=dataclasses.replace(case.rows, ancestors=bits))
        changed = np.abs(run(sabotaged, 0.35) - before).max(axis=(1, 2)) > 1e-3
        assert changed.tolist() == [i == node for i in range(8)]


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_request_does_not_see_its_neighbours(page_size):
    """What another request holds, in its pages or in its rows, changes nothing; bit for bit."""
    case = make([19, 30], [5, 6], 6, page_size=page_size)
    before = run(case, 0.35)
    q, k, v, k_pages, v_pages = (x.copy() for x in case.arrays)
    others = [1] if case.table is None else case.table[1]
    k_pages[others] *= -3
    v_pages[others] *= -3
    for x in (q, k, v):
        x[5:] *= -3
    after = run(dataclasses.replace(case, arrays=(q, k, v, k_pages, v_pages)), 0.35)
    np.testing.assert_array_equal(after[:5], before[:5])
    assert np.abs(after[5:11] - before[5:11]).max() > 0.1


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_nan_in_what_no_row_sees_stays_there(page_size, window):
    """Slots past a request's last, pages of nobody, and rows of padding may hold what an earlier request has left."""
    case = make([19, 0, 30], [5, 0, 4], 6, page_size=page_size)
    before = run(case, 0.35, window=window)
    q, k, v, k_pages, v_pages = (x.copy() for x in case.arrays)
    for pages in (k_pages, v_pages):
        pages[pages == POISON] = np.nan
    live = np.zeros(len(q), bool)
    for b, count in enumerate(case.lengths):
        live[int(case.rows.starts[b]) :][:count] = True
    for x in (q, k, v):
        x[~live] = np.nan
    after = run(dataclasses.replace(case, arrays=(q, k, v, k_pages, v_pages)), 0.35, window=window)
    np.testing.assert_array_equal(after[live], before[live])


def test_a_committed_slot_counts_and_the_next_does_not():
    case = make([16], [4], 4, page_size=16)
    before, column = run(case, 0.35), {15: (0, 15), 16: (1, 0)}
    for slot, (page, offset) in column.items():
        arrays = [x.copy() for x in case.arrays]
        arrays[4][case.table[0, page], :, offset] += 5
        after = run(dataclasses.replace(case, arrays=tuple(arrays)), 0.35)
        assert (np.abs(after - before).max() > 0.01) == (slot < 16)


def test_a_cache_that_does_not_fit_is_refused():
    case = make([4, 4, 4], [2, 2, 2], 2)
    q, k, v, *pages = case.arrays
    few, odd = [x[:2] for x in pages], [np.zeros((3, 2, 300, 8), np.float32)] * 2
    attend = functools.partial(reference.tree_attention, committed=np.array([4] * 3), rows=case.rows, scale=1.0)
    with pytest.raises(ValueError, match="needs 3 pages here, got 2"):
        attend(q, k, v, *few, None)
    with pytest.raises(ValueError, match=r"slots \(300\) must be a multiple of the attention block \(128\)"):
        attend(q, k, v, *odd, None)
