"""The loop: one round is draft -> verify -> accept -> commit. Read this file first.

`verify_commit` checks the draft that stands in the state and commits what the target agrees with; `redraft` proposes
the next one right after, so its live lengths reach the host together with the committed tokens and the host can pick
the verify program that fits: no match = one row = a plain round. Plain decoding is `verify_commit` of a root alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import sampling
from specjax.array_types import Array, Float, Int
from specjax.draft import Draft, DraftShape, Rows, pack, widen
from specjax.drafters.base import Drafter, Features
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine.accept import accept
from specjax.engine.proposal import packed
from specjax.engine.state import LENGTH, RUNNING, STOP, Emitted, Logprobs, State
from specjax.pallas_kernels.dispatch import Kernels
from specjax.targets.decoder import Output, Target
from specjax.verify.accepted import Accepted


@dataclasses.dataclass(frozen=True)
class Stage:
    """The static half of a program: what is compiled against.

    Attributes:
        target: the target's pure functions.
        drafter: the drafter, or None for plain decoding.
        shape: the draft shape, or one that all shapes of the menu fit into; its depth bounds a path, its rows the
            draft's buffers.
        rule: name of the accept rule, one of `specjax.verify.registry`.
        taps: residual streams that the drafter reads.
        top_logprobs: alternatives reported with logprobs.
        kernels: as of `RunConfig`.
    """

    target: Target
    drafter: Drafter | None
    shape: DraftShape
    rule: str
    taps: tuple[int, ...] = ()
    top_logprobs: int = 20
    kernels: Kernels = "auto"


@dataclasses.dataclass(frozen=True)
class Width:
    """The static size of a verify pass: `count` packed rows in all, at most `width` of one request."""

    count: int
    width: int


def round_step(stage: Stage, width: Width, params: Any, state: State) -> tuple[State, Emitted]:
    """One whole round, for loops that stay on the device."""
    state, emitted = verify_commit(stage, width, params, state)
    return redraft(stage, params, state), emitted


def verify_commit(
    stage: Stage, width: Width, params: Any, state: State, budgets: Int[Array, " b"] | None = None
) -> tuple[State, Emitted]:
    """Verify the state's draft in one target pass, accept a path, commit it.

    Args:
        stage: what is compiled.
        width: rows of the pass; must hold every live node of the draft.
        params: `{"target": ..., "drafter": ...}`.
        state: the state; its `draft` was made after the last commit.
        budgets: the most rows of each request, the root included: a draft is cut to its first nodes. None cuts nothing.

    Returns:
        The new state (its draft is spent) and the emitted tokens.
    """
    if budgets is not None:
        draft = dataclasses.replace(state.draft, lengths=jnp.minimum(state.draft.lengths, budgets))
        state = dataclasses.replace(state, draft=draft)
    with jax.named_scope("verify"):
        rows, out, logits = verify(stage, width, params, state)
    with jax.named_scope("accept"):
        draft, accepted = accept_path(stage, width, logits, rows, state)
    with jax.named_scope("commit"):
        return commit(stage, width, state, rows, out, logits, draft, accepted)


def verify_and_look(
    stage: Stage, width: Width, params: Any, state: State, budgets: Int[Array, " b"]
) -> tuple[State, Emitted]:
    """`verify_commit` for a set; where prompt lookup is a member, its draft for the next round then stands.

    It is made in the pass's own program: to dispatch it takes the host longer than to make it takes the device.
    """
    state, emitted = verify_commit(stage, width, params, state, budgets)
    assert isinstance(stage.drafter, DrafterSet)
    if (shape := stage.drafter.lookup) is None:
        return state, emitted
    state, scores = redraft_as(stage, shape, 0, params, state)
    return state, dataclasses.replace(emitted, lookup=packed(state, scores))


def verify(stage: Stage, width: Width, params: Any, state: State) -> tuple[Rows, Output, Float[Array, "N v"]]:
    """The target's pass over the state's draft: its packed rows, what the pass returns, and their logits."""
    committed = state.lengths - 1
    rows = pack(state.draft, committed, width.count, width.width, state.active)
    out = stage.target.forward(params["target"], rows, state.cache, committed, stage.taps)
    return rows, out, stage.target.logits(params["target"], out.hidden)


def accept_path(
    stage: Stage, width: Width, logits: Float[Array, "N v"], rows: Rows, state: State
) -> tuple[Draft, Accepted]:
    """The draft as far as the pass held it, and the path of it that the target agrees with."""
    draft = _first_nodes(state.draft, width.width)
    depth = min(stage.shape.depth, width.width - 1)
    return draft, accept(stage.rule, draft, depth, logits, rows, state)


def commit(
    stage: Stage,
    width: Width,
    state: State,
    rows: Rows,
    out: Output,
    logits: Float[Array, "N v"],
    draft: Draft,
    accepted: Accepted,
) -> tuple[State, Emitted]:
    """Move what was accepted to where it belongs, and say what came out."""
    committed, cache = state.lengths - 1, out.cache
    if not stage.shape.is_chain and width.width > 1:
        cache = kv.commit(cache, committed, accepted.path, jnp.where(state.active, accepted.count, 0))
    tokens, counts, finish = _emit(draft, accepted, state)
    on_path = jnp.minimum(rows.starts[:-1, None] + accepted.path, rows.count - 1)
    emitted = Emitted(
        tokens=tokens,
        counts=counts,
        finish=finish,
        logprobs=_logprobs(stage, state, logits, on_path, tokens),
    )
    features, memory = _features(stage, out, on_path, committed, counts), state.drafter
    if isinstance(stage.drafter, DrafterSet) and features is not None:
        features, memory = None, stage.drafter.keep(memory, features)
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=_append(state.tokens, state.lengths, tokens, counts),
        lengths=state.lengths + counts,
        active=state.active & (finish == RUNNING),
        features=features,
        drafter=memory,
    )
    return root_only(state), emitted


def root_only(state: State) -> State:
    """The state with the empty draft, a root alone: the newest committed token, not processed yet."""
    root = state.tokens[jnp.arange(state.tokens.shape[0]), state.lengths - 1]
    tokens = state.draft.tokens.at[:, 0].set(root)
    draft = dataclasses.replace(state.draft, tokens=tokens, lengths=jnp.ones_like(state.draft.lengths))
    return dataclasses.replace(state, draft=draft)


def redraft(stage: Stage, params: Any, state: State) -> State:
    """Draft for the next round from what is committed now."""
    if stage.drafter is None:
        return state
    with jax.named_scope("draft"):
        draft, memory = stage.drafter.draft(params["drafter"], state.drafter, state.context, stage.shape)
    return _with_draft(state, draft, stage.shape, memory)


def redraft_as(stage: Stage, shape: DraftShape, waiting: int, params: Any, state: State) -> tuple[State, Array]:
    """`redraft` by one drafter of a set, in one shape of its menu (see `DrafterSet.draft`); also the nodes' scores."""
    assert isinstance(stage.drafter, DrafterSet)
    with jax.named_scope(f"draft_{shape.kind}"):
        draft, memory = stage.drafter.draft(params["drafter"], state.drafter, state.context, shape, waiting)
    draft = widen(draft, stage.shape.rows)
    assert draft.scores is not None  # members of a set are deterministic
    return _with_draft(state, draft, shape, memory), draft.scores


def _with_draft(state: State, draft: Draft, shape: DraftShape, memory: Any) -> State:
    # A round emits one token more than it accepts: drafts past the budget cannot be used.
    room = jnp.maximum(state.limits - state.lengths, 1)
    lengths = jnp.where(state.active, jnp.minimum(draft.lengths, room), 1) if shape.is_chain else draft.lengths
    # Scores are for whoever cuts the draft, not for the rounds that follow.
    return dataclasses.replace(state, draft=dataclasses.replace(draft, lengths=lengths, scores=None), drafter=memory)


def spec_steps(stage: Stage, widths: tuple[Width, ...], rounds: int, params: Any, state: State):
    """Up to `rounds` rounds without the host: a `while_loop` over rounds, a `switch` over the menu's widths.

    Args:
        stage: what is compiled.
        widths: verify sizes in ascending order; the last must hold every draft.
        rounds: the most rounds; the loop also ends when no request is active.
        params: weights.
        state: the state.

    Returns:
        `(state, history, ran)`: `history` is `(Emitted, live rows)` stacked over rounds on a new leading axis, of which
        the first `ran` are real.
    """
    one = (_empty(stage, widths, params, state), state.draft.lengths)
    history = jax.tree.map(lambda x: jnp.zeros((rounds, *x.shape), x.dtype), one)

    def run(width: Width) -> Callable:
        def branch(state):
            state, emitted = round_step(stage, width, params, state)
            return state, _widen(emitted, stage.shape.depth + 1)

        return branch

    def body(carry):
        index, state, history = carry
        live = jnp.where(state.active, state.draft.lengths, 0)
        fits = jnp.array([w.count for w in widths]) >= jnp.sum(live)
        fits = fits & (jnp.array([w.width for w in widths]) >= jnp.max(live))
        state, emitted = jax.lax.switch(jnp.argmax(fits), [run(w) for w in widths], state)
        history = jax.tree.map(lambda h, e: h.at[index].set(e), history, (emitted, live))
        return index + 1, state, history

    def more(carry):
        index, state, _ = carry
        return (index < rounds) & jnp.any(state.active)

    ran, state, history = jax.lax.while_loop(more, body, (jnp.int32(0), state, history))
    return state, history, ran


def _empty(stage: Stage, widths: tuple[Width, ...], params: Any, state: State) -> Emitted:
    """The structure of a round's `Emitted` at full depth, abstractly."""
    return jax.eval_shape(
        lambda p, s: _widen(verify_commit(stage, widths[-1], p, s)[1], stage.shape.depth + 1), params, state
    )


def _widen(emitted: Emitted, steps: int) -> Emitted:
    """Pad the token axis to `steps`, so that rounds of different widths stack."""

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, steps - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) if x.ndim > 1 else x

    return jax.tree.map(pad, emitted)


def _first_nodes(draft: Draft, width: int) -> Draft:
    """The draft cut to its first `width` nodes (a valid tree: parents come first)."""
    return Draft(
        tokens=draft.tokens[:, :width],
        parents=draft.parents[:, :width],
        depths=draft.depths[:, :width],
        ancestors=draft.ancestors[:, :width],
        lengths=jnp.minimum(draft.lengths, width),
        q=None if draft.q is None else draft.q[:, :width],
    )


def _emit(draft: Draft, accepted: Accepted, state: State):
    """Tokens of a round: the accepted path's, then the target's own; cut behind an end token and at the limit."""
    request = jnp.arange(draft.tokens.shape[0])[:, None]
    steps = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)
    after_root = jnp.concatenate([accepted.path[:, 1:], jnp.zeros_like(accepted.path[:, :1])], axis=1)
    drafted = draft.tokens[request, after_root]
    tokens = jnp.where(steps < accepted.count[:, None], drafted, accepted.token[:, None])
    ends = jnp.any(tokens[:, :, None] == state.eos[:, None, :], axis=-1) & (steps <= accepted.count[:, None])
    first_end = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), tokens.shape[1])
    room = state.limits - state.lengths
    counts = jnp.minimum(jnp.minimum(accepted.count, first_end) + 1, room)
    stopped = first_end < counts
    finish = jnp.where(stopped, STOP, jnp.where(counts == room, LENGTH, RUNNING))
    counts = jnp.where(state.active, counts, 0)
    finish = jnp.where(state.active, finish, RUNNING).astype(jnp.int32)
    return jnp.where(steps < counts[:, None], tokens, 0), counts, finish


def _append(buffer: Array, lengths: Array, tokens: Array, counts: Array) -> Array:
    """Write the first `counts` of `tokens` behind each request's committed ones."""
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    request = jnp.broadcast_to(jnp.arange(buffer.shape[0])[:, None], tokens.shape)
    at = jnp.where(steps < counts[:, None], lengths[:, None] + steps, buffer.shape[1])
    return buffer.at[request, at].set(tokens, mode="drop")


def _logprobs(stage: Stage, state: State, logits: Array, on_path: Array, tokens: Array) -> Logprobs | None:
    """Log-probabilities of the emitted tokens; the work is skipped at run time where no request asked."""
    if not stage.top_logprobs:
        return None

    def compute(_):
        return Logprobs.of(sampling.logprobs(logits[on_path], tokens, stage.top_logprobs))

    shapes = jax.eval_shape(compute, 0)
    wanted = jnp.any(state.sampling.logprobs & state.active)
    return jax.lax.cond(wanted, compute, lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), 0)


def _features(stage: Stage, out: Output, on_path: Array, committed: Array, counts: Array) -> Features | None:
    """Activations of the committed rows, for a drafter that reads them: `counts` rows from the old root on."""
    drafter = stage.drafter
    if drafter is None or not (stage.taps or drafter.wants_hidden):
        return None
    steps = stage.shape.depth + 1
    on_path = jnp.pad(on_path, ((0, 0), (0, steps - on_path.shape[1])), mode="edge")
    return Features(
        positions=committed[:, None] + jnp.arange(steps, dtype=jnp.int32),
        count=counts,
        hidden=out.hidden[on_path] if drafter.wants_hidden else None,
        taps=None if out.taps is None else out.taps[on_path],
    )
