"""Random draft trees, and their topology worked out with Python sets."""

import numpy as np

Parents = list[int]


def random_parents(rng: np.random.Generator, rows: int) -> Parents:
    """Parents of a random tree of `rows` nodes, from bushy to nearly a chain."""
    reach = int(rng.integers(1, rows + 1))
    return [-1] + [int(rng.integers(max(0, node - reach), node)) for node in range(1, rows)]


def ancestor_sets(parents: Parents) -> list[set[int]]:
    """Each node with its ancestors."""
    sets: list[set[int]] = []
    for node, parent in enumerate(parents):
        sets.append({node} | (sets[parent] if parent >= 0 else set()))
    return sets


def depths(parents: Parents) -> list[int]:
    """Distance of each node from the root."""
    return [len(above) - 1 for above in ancestor_sets(parents)]


def visibility(parents: Parents) -> np.ndarray:
    """`bool[n, n]`: `[i, j]` where node `j` is node `i` or one of its ancestors."""
    sets = ancestor_sets(parents)
    return np.array([[j in sets[i] for j in range(len(parents))] for i in range(len(parents))])
