"""Cases of tree attention that every backend is held to; tests, benchmarks and tuning share them.

`QUICK` is the few that show the most, `SWEEP` all head widths, group ratios, layouts and batch patterns.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import Rows, chain, pack, tree
from specjax.pallas_kernels.tree_attention.tiles import Sizes

POISON = 1e4
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of drafts over a cache.

    Attributes:
        committed: committed slots of each request.
        lengths: live nodes of each; 0: it takes no part.
        width: the most rows of a request.
        heads: query heads.
        groups: key/value heads.
        dim: width of a head.
        page: slots of a page; None: one page a request.
        slots: slots of a request.
        window: as of the op.
        softcap: as of the op.
        dtype: of queries, keys, values and cache.
        chain: rows without ancestor words.
        fill: what lies in slots that no row may see.
        seed: of all values and trees.
    """

    committed: tuple[int, ...]
    lengths: tuple[int, ...]
    width: int
    heads: int = 4
    groups: int = 2
    dim: int = 64
    page: int | None = None
    slots: int = 512
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    chain: bool = False
    fill: float = POISON
    seed: int = 0

    @property
    def name(self) -> str:
        """What tests and tables call it."""
        cache = "dense" if self.page is None else f"page{self.page}"
        extras = [f"window{self.window}"] * (self.window is not None) + ["softcap"] * (self.softcap is not None)
        shape = f"{len(self.committed)}x{self.width}-h{self.heads}g{self.groups}f{self.dim}"
        kind = "chain" if self.chain else "tree"
        return "-".join([shape, cache, self.dtype, kind, *extras, f"seed{self.seed}"])

    @property
    def sizes(self) -> Sizes:
        """As a kernel sees them."""
        page, columns = (self.slots, 1) if self.page is None else (self.page, -(-self.slots // self.page))
        own = len(self.committed), self.width, self.heads, self.groups, self.dim, self.width
        return Sizes(*own, page, columns, jnp.dtype(self.dtype), self.window)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the op."""
        return {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Positional arguments of `tree_attention`, and which packed rows are live."""

    args: tuple
    live: np.ndarray


def random_parents(rng: np.random.Generator, rows: int) -> list[int]:
    """Parents of a random tree, from bushy to nearly a chain."""
    reach = int(rng.integers(1, rows + 1))
    return [-1] + [int(rng.integers(max(0, node - reach), node)) for node in range(1, rows)]


def build(case: Case) -> Inputs:
    """The arguments of a case; everything that no row may see holds `case.fill`."""
    rng = np.random.default_rng(case.seed)
    batch, dtype = len(case.committed), jnp.dtype(case.dtype)
    tokens = np.zeros((batch, case.width), np.int32)
    lengths = np.maximum(case.lengths, 1).astype(np.int32)
    if case.chain:
        draft = _chain(tokens, lengths)
    else:
        draft = _tree(tokens, np.array([random_parents(rng, case.width) for _ in case.committed], np.int32), lengths)
    committed = np.array(case.committed, np.int32)
    count = batch * case.width
    rows: Rows = _pack(draft, committed, count, case.width, np.array(case.lengths) > 0)
    rows = dataclasses.replace(rows, ancestors=None) if case.chain else rows
    q = rng.normal(size=(count, case.heads, case.dim)).astype(dtype)
    k, v = (rng.normal(size=(count, case.groups, case.dim)).astype(dtype) for _ in range(2))
    live = np.asarray(rows.valid)
    if batch > 1:  # one request's padding rows hold what the model makes of them; finite
        for x in (q, k, v):
            x[~live] = case.fill
    table, pages = _cache(case, rng, dtype)
    return Inputs(args=(q, k, v, *pages, table, committed, rows), live=live)


def _cache(case: Case, rng: np.random.Generator, dtype) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """The page table and the keys' and values' pages, in a random order, with a page that nobody owns."""
    batch = len(case.committed)
    pages = []
    for _ in range(2):
        x = rng.normal(size=(batch, case.groups, case.slots, case.dim)).astype(dtype)
        for b, length in enumerate(case.committed):
            x[b, :, length:] = case.fill
        pages.append(x)
    if case.page is None:
        return None, pages
    columns = -(-case.slots // case.page)
    table = 1 + rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    for i, x in enumerate(pages):
        cut = x.reshape(batch, case.groups, columns, case.page, case.dim).transpose(0, 2, 1, 3, 4)
        pages[i] = np.full((1 + batch * columns, case.groups, case.page, case.dim), case.fill, dtype)
        pages[i][table] = cut
    return table, pages


# Jitted, so that building a case compiles these and nothing else.
_chain, _tree = jax.jit(chain), jax.jit(tree)
_pack = jax.jit(pack, static_argnums=(2, 3))

NAN = float("nan")
_EDGES = ((0, 15, 16, 17), (63, 64, 65, 1), (127, 128, 129, 0), (255, 256, 257, 500))
_RAGGED = ((5, 1, 7, 3), (7, 7, 7, 7), (1, 6, 0, 2), (0, 4, 1, 7))


@functools.cache
def quick() -> tuple[Case, ...]:
    """A few cases that between them reach every branch of a kernel."""
    return (
        Case((300, 128, 0, 17), (7, 1, 3, 0), 7, heads=8, dim=64, page=16, fill=NAN),
        Case((500, 255, 129), (5, 40, 33), 40, dim=128, page=64, window=70, softcap=5.0, slots=512, seed=1),
        Case((511,), (1,), 1, heads=6, groups=2, dim=128, dtype="bfloat16", fill=NAN, seed=2),
        Case((400, 31), (128, 77), 128, heads=2, groups=1, dim=80, page=256, dtype="bfloat16", seed=3),
        Case((384, 1, 130), (6, 4, 0), 6, heads=3, groups=3, dim=96, chain=True, window=24, fill=NAN, seed=4),
    )


@functools.cache
def sweep() -> tuple[Case, ...]:
    """Head widths, both types and two ratios each; layouts, windows, softcaps and batch patterns, of which any
    two values meet in some case (pairwise testing; all combinations would be many more); trees of 2 to 128 nodes.
    """
    found = []
    ratios = ((4, 4), (4, 1), (14, 2), (3, 1))
    for at, dim in enumerate((64, 80, 96, 128, 192, 256)):
        for turn, dtype in enumerate(("float32", "bfloat16")):
            heads, groups = ratios[(at + 2 * turn + at // 4) % 4]
            found.append(Case((150, 3), (6, 4), 6, heads=heads, groups=groups, dim=dim, page=16, dtype=dtype, fill=NAN))
    for (i, page), (j, window) in itertools.product(enumerate((None, 16, 64, 128)), enumerate((None, 1, 24, 200))):
        at = (i + j) % len(_EDGES)
        shape = {"heads": 4, "groups": 2, "dim": 128, "slots": 768 if page is None else 640}
        softcap = 5.0 if (i + j // 2) % 2 else None
        found.append(
            Case(_EDGES[at], _RAGGED[at], 7, page=page, window=window, softcap=softcap, seed=at, fill=NAN, **shape)
        )
    for seed, width in enumerate((2, 3, 31, 32, 33, 64, 65, 127, 128)):
        one, two = (None, 32)[:: 1 if seed % 2 else -1]
        found.append(Case((70 * seed,), (width,), width, page=one, slots=768, seed=seed))
        found.append(Case((300, 5), (width, width // 2), width, page=two, dtype="bfloat16", seed=seed))
    for seed, committed in enumerate((0, 1, 511, 512)):
        found.append(Case((committed,), (1,), 1, dim=128, slots=768, seed=seed, fill=NAN))
        found.append(Case((committed,) * 2, (4, 4), 4, dim=128, chain=True, page=256, slots=768, seed=seed))
    return tuple(found)
