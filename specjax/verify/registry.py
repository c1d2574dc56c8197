"""The accept rules by name, with what each needs. A new rule is a function in a file of its own and an entry here."""

import dataclasses
from collections.abc import Callable
from functools import cache

from specjax.verify.accepted import Accepted
from specjax.verify.block import block
from specjax.verify.chain import chain
from specjax.verify.tree import recursive, tree


@dataclasses.dataclass(frozen=True)
class Rule:
    """An accept rule. All that stand here are lossless in the stated range of temperatures.

    Attributes:
        name: the name in configs and on the command line.
        accept: `accept(draft, depth, p, q, u_accept, u_next)` if the rule samples, else `accept(draft, depth, choice)`
            with the target's token at each node.
        samples: whether it reads `p`, `q` and uniform numbers; otherwise it reads the target's choices only.
        needs_q: whether a sampled draft must carry its `q`; without one the drafts are taken as deterministic.
        takes_trees: whether a node may have several children.
        greedy_only: whether it stands for the target only at temperature 0.
    """

    name: str
    accept: Callable[..., Accepted]
    samples: bool
    needs_q: bool
    takes_trees: bool
    greedy_only: bool = False


@cache
def rules() -> dict[str, Rule]:
    """Every rule, by name."""
    listed = (
        Rule("tree", tree, samples=False, needs_q=False, takes_trees=True),
        Rule("greedy", tree, samples=False, needs_q=False, takes_trees=True, greedy_only=True),
        Rule("chain", _whole_chain(chain), samples=True, needs_q=True, takes_trees=False),
        Rule("block", _whole_chain(block), samples=True, needs_q=True, takes_trees=False),
        Rule("recursive", recursive, samples=True, needs_q=True, takes_trees=True),
    )
    return {rule.name: rule for rule in listed}


def get_rule(name: str) -> Rule:
    """The rule called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in rules():
        raise ValueError(f"no accept rule is called {name!r}; there are {', '.join(rules())}")
    return rules()[name]


def _whole_chain(rule: Callable[..., Accepted]) -> Callable[..., Accepted]:
    """Give a chain rule the signature of a tree rule; the depth of a chain is its rows."""

    def accept(draft, depth, p, q, u_accept, u_next):
        rows = draft.tokens.shape[1]
        if depth != rows - 1:
            raise ValueError(f"a chain of {rows} rows has depth {rows - 1}, got {depth}: this rule takes no trees")
        return rule(draft, p, q, u_accept, u_next)

    return accept
