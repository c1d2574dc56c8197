"""Exact enumeration of the shipped accept rules on tiny vocabularies.

A rule is a function of a few uniform numbers, constant inside the cells of a grid whose lines are the thresholds that
the rule compares them with. `support.thresholds` works those out in float64; the jitted rule is then asked at several
points of every cell, all cells being one batch, and each answer weighs its cell's volume. If a threshold were wrong the
answers inside a cell would differ, and the volume of such cells is reported too.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft as trees

CHUNK = 4096
POINTS = 4
BUILD = jax.jit(trees.tree)


@dataclasses.dataclass
class Case:
    """One draft that may come up, and the thresholds of the uniform numbers that judge it.

    Attributes:
        probability: how often the drafter makes it.
        tokens: node tokens, the root first.
        p, q: the distributions at its nodes; q may be None.
        accept_cuts: thresholds of `u_accept` at each node.
        next_weights: every distribution that the next token may be drawn from.
        length: live nodes.
    """

    probability: float
    tokens: list[int]
    p: np.ndarray
    q: np.ndarray | None
    accept_cuts: list[list[float]]
    next_weights: list[np.ndarray]
    length: int


@dataclasses.dataclass
class Law:
    """What a rule emits: probability by emitted tokens, the mean of accepted drafts, the volume of uneven cells."""

    emitted: dict[tuple[int, ...], float]
    accepted: float
    uneven: float

    def error(self, p, horizon: int) -> float:
        """Largest difference from the law of `p` over `horizon` tokens, what is not emitted being drawn from `p`."""
        vocab = len(p[()])
        got, want = np.zeros((vocab,) * horizon), np.zeros((vocab,) * horizon)
        for text in itertools.product(range(vocab), repeat=horizon):
            conditional = [p[text[:i]][text[i]] for i in range(horizon)]
            want[text] = np.prod(conditional)
            for size in range(1, horizon + 1):
                got[text] += self.emitted.get(text[:size], 0.0) * np.prod(conditional[size:])
        return float(np.abs(got - want).max())


def cells(cuts) -> list[tuple[float, float]]:
    """The intervals of [0, 1) between `cuts`; cuts closer than 3e-6 to the last one are merged with it."""
    edges = [0.0]
    for cut in sorted(cuts):
        if edges[-1] + 3e-6 < cut < 1 - 3e-6:
            edges.append(float(cut))
    return list(itertools.pairwise([*edges, 1.0]))


def cumulative(weights) -> list[float]:
    """Thresholds of an inverse-CDF draw from `weights`."""
    return list(np.cumsum(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64))


def grid(variables) -> tuple[np.ndarray, np.ndarray]:
    """Points `[cells, POINTS, variables]` of all cells of the cuts of each variable, and the cells' volumes."""
    rng = np.random.default_rng(0)
    boxes = np.array(list(itertools.product(*(cells(cuts) for cuts in variables))))  # [cells, variables, 2]
    low, width = boxes[..., 0], boxes[..., 1] - boxes[..., 0]
    edge = np.minimum(4e-6, 0.4 * width)
    at = rng.choice([0.03, 0.5, 0.97], size=(len(boxes), POINTS, len(variables)))
    at[:, 0], at[:, 1] = 0.03, 0.97
    points = (low + edge)[:, None] + (width - 2 * edge)[:, None] * at
    return np.minimum(points, 1 - 2**-24).astype(np.float32), width.prod(axis=-1)


def judge(rule, parents, cases, variables, place) -> Law:
    """Enumerate `rule(draft, p, q, u_accept, u_next)` (jitted).

    Args:
        rule: the rule.
        parents: parents of the nodes, the same for all drafts.
        cases: the drafts.
        variables: `variables(case)` gives the cuts of each independent uniform number.
        place: `place(points[rows, variables])` gives `u_accept` and `u_next`.
    """
    columns = {name: [] for name in ("case", "u_accept", "u_next")}
    volumes = []
    for index, case in enumerate(cases):
        points, volume = grid(variables(case))
        u_accept, u_next = place(points.reshape(-1, points.shape[-1]))
        columns["case"].append(np.full(len(u_accept), index))
        columns["u_accept"].append(u_accept)
        columns["u_next"].append(u_next)
        volumes.append(volume * case.probability)
    columns = {name: np.concatenate(rows) for name, rows in columns.items()}
    tokens = np.array([case.tokens for case in cases], np.int32)
    lengths = np.array([case.length for case in cases], np.int32)
    p = np.stack([case.p for case in cases]).astype(np.float32)
    q = None if cases[0].q is None else np.stack([case.q for case in cases]).astype(np.float32)

    answers = []
    total = len(columns["case"])
    for start in range(0, total, CHUNK):
        take = np.minimum(np.arange(start, start + CHUNK), total - 1)  # a fixed size, so one compilation
        which = columns["case"][take]
        chunk_q = None if q is None else jnp.asarray(q[which])
        draft = BUILD(
            jnp.asarray(tokens[which]),
            jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens[which].shape),
            jnp.asarray(lengths[which]),
            chunk_q,
        )
        out = rule(draft, jnp.asarray(p[which]), chunk_q, columns["u_accept"][take], columns["u_next"][take])
        path, count, token = (np.asarray(x) for x in (out.path, out.count, out.token))
        assert (path[:, 0] == 0).all()
        assert (path[np.arange(path.shape[1]) > count[:, None]] == 0).all()
        # A real path: each node stands under the one before, and none of it is padding.
        on_path = np.arange(1, path.shape[1]) <= count[:, None]
        assert (np.asarray(parents)[path[:, 1:]] == path[:, :-1])[on_path].all()
        assert ((path[:, 1:] > 0) & (path[:, 1:] < lengths[which][:, None]))[on_path].all()
        # One row an answer: the accepted drafts, the token, and -1 for what was not emitted.
        drafted = np.where(on_path, np.take_along_axis(tokens[which], path[:, 1:], axis=1), -1)
        text = np.concatenate([drafted, np.full((CHUNK, 1), -1)], axis=1)
        text[np.arange(CHUNK), count] = token
        answers.append(text[: total - start])

    answers, weights = np.concatenate(answers), np.repeat(np.concatenate(volumes) / POINTS, POINTS)
    by_cell = answers.reshape(-1, POINTS, answers.shape[1])
    uneven = np.concatenate(volumes)[(by_cell != by_cell[:, :1]).any(axis=(1, 2))].sum()
    texts, which = np.unique(answers, axis=0, return_inverse=True)
    mass = np.bincount(which.reshape(-1), weights)
    emitted = {tuple(t for t in text.tolist() if t >= 0): float(m) for text, m in zip(texts, mass, strict=True)}
    accepted = sum((len(text) - 1) * m for text, m in emitted.items())
    return Law(emitted=emitted, accepted=accepted, uneven=float(uneven))


def random_distribution(rng, vocab: int, zeros: int = 0) -> np.ndarray:
    weights = rng.gamma(0.8, size=vocab) + 0.02
    weights[rng.permutation(vocab)[:zeros]] = 0
    return (weights / weights.sum()).astype(np.float32).astype(np.float64)


def one_hot(rng, vocab: int) -> np.ndarray:
    return np.eye(vocab)[rng.integers(vocab)]


def world(kind: str, vocab: int, depth: int, seed: int):
    """`p` and `q` by prefix: every kind of pair that a rule may meet."""
    rng = np.random.default_rng(seed)
    p, q = {}, {}
    for size in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=size):
            p[prefix] = random_distribution(rng, vocab, zeros=int(rng.integers(vocab)) if kind == "zeros" else 0)
            q[prefix] = random_distribution(rng, vocab, zeros=int(rng.integers(vocab)) if kind == "zeros" else 0)
            if kind == "equal" or (kind == "mixed" and rng.random() < 0.5):
                q[prefix] = p[prefix]
            elif kind == "greedy target":
                p[prefix] = one_hot(rng, vocab)
            elif kind == "greedy drafter":
                q[prefix] = one_hot(rng, vocab)
            elif kind == "greedy":
                p[prefix], q[prefix] = one_hot(rng, vocab), one_hot(rng, vocab)
            elif kind == "apart":  # no common support: everything is rejected
                half = np.arange(vocab) % 2 == size % 2
                p[prefix] = p[prefix] * half / (p[prefix] * half).sum()
                q[prefix] = q[prefix] * ~half / (q[prefix] * ~half).sum()
    return p, q


def prefixes(parents, tokens) -> list[tuple[int, ...]]:
    """The drafted tokens on the way to each node, its own included."""
    found = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    return found


def every_draft(q, parents) -> list[tuple[float, list[int]]]:
    """All drafts of a sampled tree with their probabilities; siblings are drawn without replacement.

    Where a drafter's support is used up, the next sibling is the lowest token not among its elders (no draw).
    """
    drafts = [(1.0, [0])]
    for node in range(1, len(parents)):
        longer = []
        for probability, tokens in drafts:
            elders = [tokens[i] for i in range(1, node) if parents[i] == parents[node]]
            left = q[prefixes(parents[:node], tokens)[parents[node]]].copy()
            left[elders] = 0
            if left.sum() == 0:
                left[min(set(range(len(left))) - set(elders))] = 1
            longer += [(probability * left[y] / left.sum(), [*tokens, y]) for y in np.flatnonzero(left).tolist()]
        drafts = longer
    return drafts


def sampled_variables(case: Case) -> list:
    """Cuts of the variables of a sampled rule: one test a node, one draw."""
    return [*case.accept_cuts[1:], itertools.chain(*map(cumulative, case.next_weights))]


def sampled_place(points):
    """Variables of a sampled rule: one test a node, one draw (a rule draws once, on whatever node it stops)."""
    tests = np.concatenate([np.zeros_like(points[:, :1]), points[:, :-1]], axis=1)
    return tests, np.repeat(points[:, -1:], points.shape[1], axis=1)
