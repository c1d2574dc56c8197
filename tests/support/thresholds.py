"""The thresholds that the sampled accept rules compare their uniform numbers with, for every draft, in float64."""

from collections.abc import Iterator

import numpy as np

from support import exact
from support.exact import Case


def chain(p, q, depth: int, length: int, point: bool = False) -> Iterator[Case]:
    """Every chain draft of `depth` with the thresholds of chain rejection; `point`: every token, as a point mass."""
    parents = list(range(-1, depth))
    vocab = len(p[()])
    for probability, tokens in exact.every_draft(q, parents):
        at = exact.prefixes(parents, tokens)
        cuts, weights = [[]], []
        for node in range(depth):
            x = tokens[node + 1]
            here_q = np.eye(vocab)[x] if point else q[at[node]]
            cuts.append([p[at[node]][x] / here_q[x]])
            rest = np.maximum(p[at[node]] - here_q, 0)
            weights.append(rest if rest.sum() > 0 else p[at[node]])
            weights.append(p[at[node]])
        weights.append(p[at[depth]])
        node_q = None if point else np.stack([q[prefix] for prefix in at])
        yield exact.Case(probability, tokens, np.stack([p[x] for x in at]), node_q, cuts, weights, length)


def block(p, q, depth: int, length: int, point: bool = False) -> Iterator[Case]:
    """Every chain draft of `depth` with the thresholds of block verification (in float64, factor by factor)."""
    parents = list(range(-1, depth))
    vocab, last = len(p[()]), length - 1
    for probability, tokens in exact.every_draft(q, parents):
        at = exact.prefixes(parents, tokens)
        node_q = [np.eye(vocab)[tokens[min(i + 1, depth)]] if point else q[at[i]] for i in range(depth + 1)]
        prefix, cuts, weights = 1.0, [[]], []
        for node in range(last + 1):
            rest = np.maximum(prefix * p[at[node]] - node_q[node], 0)
            if node == last:
                passes, weights = prefix, [*weights, p[at[node]]]
            else:
                passes = 1.0 if prefix >= 1 else rest.sum() / (rest.sum() + 1 - prefix)
                weights.append(rest if rest.sum() > 0 else p[at[node]])
                x = tokens[node + 1]
                prefix = min(1.0, prefix * p[at[node]][x] / node_q[node][x])
            if node:
                cuts.append([passes])
        cuts += [[]] * (depth - last)
        stacked = None if point else np.stack([q[x] for x in at])
        yield exact.Case(probability, tokens, np.stack([p[x] for x in at]), stacked, cuts, weights, length)


def siblings(parents, tokens, p, q):
    """Thresholds of recursive rejection at each node, and every distribution left on the way (float64)."""
    cuts, left = [[] for _ in parents], []
    for node in range(len(parents)):
        r = p[node].astype(np.float64)
        mine = np.zeros_like(r) if q is None else q[node].astype(np.float64)
        left.append(r)
        for child in (j for j in range(len(parents)) if parents[j] == node):
            y = tokens[child]
            drawn_from = mine if mine[y] > 0 else np.eye(len(r))[y]
            cuts[child] = [r[y] / drawn_from[y]]
            rest = np.maximum(r - drawn_from, 0)
            r = rest / rest.sum() if rest.sum() > 0 else r
            mine = np.where(np.arange(len(r)) == y, 0, mine)
            mine = mine / mine.sum() if mine.sum() > 0 else mine
            left.append(r)
    return cuts, left


def recursive(p, q, parents, length: int | None = None) -> Iterator[Case]:
    """Every tree over `parents`, siblings drawn from `q` without replacement, with the thresholds of its nodes."""
    for probability, tokens in exact.every_draft(q, parents):
        at = exact.prefixes(parents, tokens)
        node_p, node_q = (np.stack([table[prefix] for prefix in at]) for table in (p, q))
        cuts, left = siblings(parents, tokens, node_p, node_q)
        yield exact.Case(probability, tokens, node_p, node_q, cuts, left, length or len(parents))
