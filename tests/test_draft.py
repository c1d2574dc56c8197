"""Draft topology and packing against plain Python."""

import jax
import numpy as np
import pytest
from support import trees

from specjax import draft as drafts
from specjax.draft import DraftShape, ancestor_matrix, chain, pack, tree

MATRIX = jax.jit(ancestor_matrix)
THERE_AND_BACK = jax.jit(lambda rows, x: (rows.unpack(x), rows.pack(rows.unpack(x))))


def on_host(function, **options):
    """`function` compiled, its arrays as numpy: looking at them entry by entry compiles nothing more."""
    compiled = jax.jit(function, **options)
    return lambda *args: jax.device_get(compiled(*args))


BUILD, CHAIN, TOPOLOGY = on_host(tree), on_host(chain), on_host(drafts.topology)
PACK = on_host(pack, static_argnums=(2, 3))


def bits(parents):
    """Ancestor words of a tree as Python integers made of bits, then read as signed 32-bit numbers."""
    words = -(-len(parents) // 32)
    out = np.zeros((len(parents), words), np.uint32)
    for node, above in enumerate(trees.ancestor_sets(parents)):
        for j in above:
            out[node, j // 32] |= np.uint32(1 << (j % 32))
    return out.view(np.int32)


@pytest.mark.parametrize("rows", [1, 2, 6, 32, 33, 70])
def test_topology_of_random_trees(rows):
    rng = np.random.default_rng(rows)
    parents = [trees.random_parents(rng, rows) for _ in range(8)]
    depths, ancestors = TOPOLOGY(np.array(parents, np.int32))
    assert ancestors.shape == (8, rows, -(-rows // 32))
    assert ancestors.dtype == np.int32
    seen = jax.device_get(MATRIX(ancestors))
    for b, one in enumerate(parents):
        np.testing.assert_array_equal(seen[b], trees.visibility(one))
        np.testing.assert_array_equal(depths[b], trees.depths(one))
        np.testing.assert_array_equal(ancestors[b], bits(one))


def test_bit_31_is_the_sign():
    """A node with index 31 sets the sign bit of its word; its descendants inherit it, later words stay apart."""
    parents = [-1] + [0] * 31 + [31, 32]
    ancestors = TOPOLOGY(np.array([parents], np.int32))[1][0]
    assert ancestors[31].tolist() == [1 - 2**31, 0]
    assert ancestors[33].tolist() == [1 - 2**31, 3]


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 70])
def test_a_chain_is_a_tree_with_one_child_a_node(rows):
    tokens, lengths = np.arange(2 * rows, dtype=np.int32).reshape(2, rows), np.array([rows, 1], np.int32)
    parents = np.tile(np.arange(-1, rows - 1, dtype=np.int32), (2, 1))
    one, other = CHAIN(tokens, lengths), BUILD(tokens, parents, lengths)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_any_prefix_of_the_nodes_is_a_tree():
    parents = trees.random_parents(np.random.default_rng(0), 40)
    _, whole = TOPOLOGY(np.array([parents], np.int32))
    _, cut = TOPOLOGY(np.array([parents[:33]], np.int32))
    np.testing.assert_array_equal(whole[:, :33], cut)


def ragged(lengths, width, seed=0):
    """A batch of random trees of the given live lengths: the draft, the parents, the committed lengths."""
    rng = np.random.default_rng(seed)
    parents = [trees.random_parents(rng, width) for _ in lengths]
    tokens = rng.integers(0, 1000, (len(lengths), width), dtype=np.int32)
    committed = rng.integers(0, 50, len(lengths), dtype=np.int32)
    return BUILD(tokens, np.array(parents, np.int32), np.array(lengths, np.int32)), parents, committed


@pytest.mark.parametrize(
    ("lengths", "active"),
    [
        ([3, 1, 6], [1, 1, 1]),
        ([3, 6, 2], [1, 0, 1]),
        ([4, 4, 4], [0, 1, 1]),
        ([5, 2, 6], [1, 1, 0]),
        ([6, 6, 6], [1, 1, 1]),
        ([2, 2, 2], [0, 0, 0]),
        ([9, 1, 8], [1, 1, 1]),  # longer than the width: cut to it
    ],
)
@pytest.mark.parametrize("width", [6, 3])
def test_pack_lays_live_nodes_of_active_requests_end_to_end(lengths, active, width):
    draft, parents, committed = ragged(lengths, width=9)
    rows = PACK(draft, committed, 3 * width, width, np.array(active, bool))
    want = [(b, node) for b, n in enumerate(lengths) if active[b] for node in range(min(n, width))]
    valid = rows.valid
    assert valid.tolist() == [True] * len(want) + [False] * (3 * width - len(want))
    assert list(zip(rows.request[valid].tolist(), rows.node[valid].tolist(), strict=True)) == want
    counts = [min(n, width) if on else 0 for n, on in zip(lengths, active, strict=True)]
    assert rows.starts.tolist() == [0, *np.cumsum(counts)]
    for i, (b, node) in enumerate(want):
        root = int(committed[b])
        assert rows.tokens[i] == draft.tokens[b, node]
        assert rows.positions[i] == root + trees.depths(parents[b])[node]
        assert rows.slots[i] == root + node
        np.testing.assert_array_equal(rows.ancestors[i], bits(parents[b])[node])


@pytest.mark.parametrize(
    ("lengths", "active"), [([3, 1, 6], [1, 1, 1]), ([3, 6, 2], [1, 0, 1]), ([6, 6, 6], [1, 1, 1])]
)
def test_pack_and_unpack_are_inverse_on_live_rows(lengths, active):
    draft, _, committed = ragged(lengths, width=6)
    rows = PACK(draft, committed, 18, 6, np.array(active, bool))
    live = (np.arange(6) < np.array(lengths)[:, None]) & np.array(active, bool)[:, None]
    features = np.random.default_rng(1).normal(size=(18, 5)).astype(np.float32)
    features[:, 0] = rows.tokens
    padded, back = jax.device_get(THERE_AND_BACK(rows, features))
    assert padded.shape == (3, 6, 5)
    np.testing.assert_array_equal(padded[live][:, 0], draft.tokens[live])
    np.testing.assert_array_equal(back[rows.valid], features[rows.valid])
    assert np.isfinite(padded).all()


def test_one_request_packs_to_itself():
    draft, parents, _ = ragged([4], width=6)
    rows = PACK(draft, np.array([7], np.int32), 6, 6, np.array([True]))
    assert rows.valid.tolist() == [True] * 4 + [False] * 2
    assert rows.slots.tolist() == list(range(7, 13))
    assert rows.positions.tolist() == [7 + d for d in trees.depths(parents[0])]
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    padded, back = THERE_AND_BACK(rows, x)
    np.testing.assert_array_equal(padded, x[None])
    np.testing.assert_array_equal(back, x)
    with pytest.raises(ValueError, match="8 rows for a width of 6"):
        pack(draft, np.array([7]), 8, 6, np.array([True]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"depth": 4, "branching": 2, "rows": 4}, "depth 4 needs at least 5 rows, got 4"),
        ({"depth": 2, "branching": 1, "rows": 4}, "chain of depth 2 has 3 rows, got 4"),
        ({"depth": 2, "branching": 0, "rows": 4}, "branching at least 1"),
        ({"depth": -1, "branching": 1, "rows": 1}, "depth must be at least 0"),
    ],
)
def test_impossible_shapes_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        DraftShape(kind="x", **bad)


def test_shapes_are_hashable_and_ordered():
    shapes = [DraftShape.chain("x", k) for k in (4, 1, 7)]
    assert [s.rows for s in sorted(shapes)] == [2, 5, 8]
    assert len({*shapes, DraftShape.chain("x", 4)}) == 3
    assert drafts.PLAIN.is_chain
    assert all(shape.is_chain for shape in shapes)
