"""The shapes that are worth a program, by drafter, and the widths of the verify pass."""

from collections.abc import Iterable

from specjax.draft import PLAIN, DraftShape

_CHAINS = {
    "ngram": (3, 5, 8, 16),
    "suffix": (3, 5, 8, 16),
    "eagle3": (1, 2, 3, 5),
    "mtp": (1, 2, 3),
    "dflash": (3, 7, 15),
    "dspark": (3, 5, 7),
    "peagle": (3, 5, 7),
    "ubtree": (3, 7),
    "hybrid": (3, 5),
}
_TREES = {  # depth, branching, rows with the root
    "eagle3": ((3, 4, 8), (5, 4, 16), (7, 4, 32)),
    "ubtree": ((7, 4, 16), (7, 4, 32)),
    "hybrid": ((3, 4, 8), (5, 4, 16), (7, 4, 32)),
}


def shapes(kinds: Iterable[str]) -> tuple[DraftShape, ...]:
    """The menu of some drafters, plain decoding always first.

    Raises:
        ValueError: a kind without shapes; the known ones are listed.
    """
    menu = [PLAIN]
    for kind in kinds:
        if kind == PLAIN.kind:
            continue
        if kind not in _CHAINS:
            raise ValueError(f"no shapes are known for a drafter {kind!r}; known kinds are {', '.join(_CHAINS)}")
        menu += [DraftShape.chain(kind, depth) for depth in _CHAINS[kind]]
        menu += [DraftShape(kind, *sizes) for sizes in _TREES.get(kind, ())]
    return tuple(dict.fromkeys(menu))


def widths(batch: int, rows: int) -> tuple[int, ...]:
    """Total rows of the verify passes of an engine for `batch` requests of at most `rows` rows each, ascending.

    The fullest pass, and halves of it and of the plain one: few programs, none more than twice too wide.
    """
    sizes = set()
    for size in (batch, batch * rows):
        while size > 1:
            sizes.add(size)
            size = -(-size // 2)
    return tuple(sorted(sizes | {1}))
