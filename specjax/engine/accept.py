"""From logits to an accepted path: the target's processed distribution or choice at each node, then the accept rule."""

import jax.numpy as jnp

from specjax import sampling
from specjax.array_types import Array, Float, Int
from specjax.config import ConfigError
from specjax.draft import Draft, DraftShape, Rows
from specjax.engine.state import State
from specjax.sampling import Seen
from specjax.verify.accepted import Accepted, round_uniforms
from specjax.verify.registry import get_rule


def resolve_rule(name: str, shape: DraftShape, sampled: bool) -> str:
    """The accept rule that `accept: name` means for drafts of this shape.

    Args:
        name: a rule, or `auto`: `tree` for deterministic drafts, `chain` or `recursive` for sampled ones.
        shape: the draft shape.
        sampled: whether drafts carry their `q`.

    Raises:
        ConfigError: the rule does not fit the drafts.
    """
    if name == "auto":
        name = "tree" if not sampled else "chain" if shape.is_chain else "recursive"
    rule = get_rule(name)
    if not shape.is_chain and not rule.takes_trees:
        raise ConfigError(
            f"accept {name!r} takes chains only, but {shape.kind} drafts trees; use 'tree' or 'recursive'"
        )
    if sampled and not rule.samples:
        raise ConfigError(f"accept {name!r} takes deterministic drafts, but draft_sampling is 'sampled'")
    return name


def accept(rule_name: str, draft: Draft, depth: int, logits: Float[Array, "N v"], rows: Rows, state: State) -> Accepted:
    """Accept a path of each request's draft.

    Args:
        rule_name: the accept rule.
        draft: the draft, cut to the rows of the pass.
        depth: the most drafts to accept.
        logits: the target's logits at the packed rows.
        rows: the packed rows.
        state: parameters, committed tokens and seeds of the requests.
    """
    rule = get_rule(rule_name)
    seen = Seen(
        tokens=state.tokens,
        lengths=state.lengths,
        prompt_lengths=state.prompt_lengths,
        eos=state.eos,
        draft=draft,
        node=rows.node,
        valid=rows.valid,
    )
    after = rows.positions + 1
    if not rule.samples:
        choice = sampling.choose(logits, rows.request, state.sampling, after, seen)
        return rule.accept(draft, depth, rows.unpack(choice))
    p = rows.unpack(sampling.target_distribution(logits, rows.request, state.sampling, after, seen))
    if rows.batch > 1:
        # A request without rows reads a neighbour's; it emits nothing, but its numbers must stay finite.
        p = jnp.where(jnp.isfinite(p), p, 0)
    u_accept, u_next = round_uniforms(draft, state.lengths, state.sampling.seed)
    return rule.accept(draft, depth, p, draft.q, u_accept, u_next)


def choose_first(logits: Float[Array, "1 v"], row: Int[Array, ""], state: State) -> Int[Array, " 1"]:
    """The token behind the prompt of request `row`."""
    seen = Seen(tokens=state.tokens, lengths=state.lengths, prompt_lengths=state.prompt_lengths, eos=state.eos)
    position = state.prompt_lengths[row][None]
    return sampling.choose(logits, jnp.reshape(row, (1,)), state.sampling, position, seen)
