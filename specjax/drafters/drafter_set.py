"""Several drafters of one engine: every round drafts with the one that its shape names.

A drafter that reads the target's features falls behind while another drafts. Its rows wait in a ring of the newest
committed positions, and are taken in before it drafts again. The ring holds so many positions and no more: whoever
picks the shapes (`engine.pilot`) lets a drafter catch up before it is full. Nothing is ever dropped, so a drafter that
was off drafts what it would have drafted.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from specjax.array_types import Array, Float, Int, pytree
from specjax.draft import Draft, DraftShape
from specjax.drafters.base import Context, Drafter, Features
from specjax.drafters.block_drafter import BlockDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.drafters.recurrent import Recurrent

ROUNDS = 4  # of the longest kind that a drafter may miss without having to catch up
RING = 64  # positions; a pass over so many rows in one layer costs about what a few drafted tokens do


@pytree
class SetState:
    """What the members remember, and what those that read features have still to read.

    Attributes:
        members: each member's own state.
        taken: positions that each member has taken in.
        hidden: post-norm hidden states of the newest positions, position p in slot `p % ring`; None if nobody reads it.
        taps: residual streams of the same, all members' taps.
    """

    members: tuple[Any, ...]
    taken: Int[Array, "m b"]
    hidden: Float[Array, "b s d"] | None
    taps: Float[Array, "b s e"] | None


@dataclasses.dataclass(frozen=True)
class DrafterSet:
    """Drafters that take turns.

    Attributes:
        members: the drafters; deterministic ones, of different kinds.
        menu: the shapes that they may be asked for, `kind` naming the member.
        width: width of the target's hidden states.
        dtype: dtype of the features that wait.
        ring: positions that may wait.
        kind: the name in configs.

    Raises:
        ValueError: at construction, for members that cannot take turns, or a menu that they cannot fill.
    """

    members: tuple[Drafter, ...]
    menu: tuple[DraftShape, ...]
    width: int
    dtype: str = "float32"
    ring: int = RING
    kind: str = "auto"

    def __post_init__(self):
        kinds = [member.kind for member in self.members]
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"a set needs drafters of different kinds, got {', '.join(kinds) or 'none'}")
        for member in self.members:
            if getattr(member, "sampled", False):
                raise ValueError(f"{member.kind} draws its drafts; the drafters of a set must be deterministic")
            if isinstance(member, DraftModel) or isinstance(getattr(member, "model", None), DraftModel):
                raise ValueError(
                    f"{member.kind}: a whole draft model cannot sit out rounds (its cache would miss their tokens); "
                    "leave it out of the set, or use it alone"
                )
        for shape in self.menu:
            if shape.kind not in kinds:
                raise ValueError(f"no drafter of the set makes {shape}; its kinds are {', '.join(kinds)}")
            if shape.depth + 1 >= self.ring:
                raise ValueError(f"{shape} is as deep as the ring of {self.ring} waiting positions; raise ring")
        if not self.menu:
            raise ValueError("a set of drafters needs a menu of shapes")

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for member in self.members for tap in member.taps}))

    @property
    def wants_hidden(self) -> bool:
        return any(member.wants_hidden for member in self.members)

    @property
    def shape(self) -> DraftShape:
        """The smallest shape that every shape of the menu fits into."""
        rows, depth = max(s.rows for s in self.menu), max(s.depth for s in self.menu)
        if all(s.is_chain for s in self.menu):
            return DraftShape.chain(self.kind, depth)
        return DraftShape(self.kind, depth, max(2, *(s.branching for s in self.menu)), rows)

    @property
    def lookup(self) -> DraftShape | None:
        """What prompt lookup makes, if it is a member: so cheap that every pass ends with one."""
        return next((member.shape for member in self.members if isinstance(member, NGram)), None)

    @property
    def steps(self) -> int:
        """Rows of a request that one round leaves to be taken in, at most."""
        return self.shape.depth + 1

    @property
    def room(self) -> int:
        """Rows that a draft takes in of itself, at most; who misses more catches up first, on the whole ring."""
        return min(ROUNDS * self.steps, self.ring)

    def reads_features(self, kind: str) -> bool:
        """Whether the member `kind` falls behind in rounds of others."""
        member = self.members[self._index(kind)]
        return bool(member.taps) or member.wants_hidden

    def init_state(self, batch: int, capacity: int) -> SetState:
        def waiting(width: int) -> Array | None:
            return jnp.zeros((batch, self.ring, width), jnp.dtype(self.dtype)) if width else None

        return SetState(
            members=tuple(member.init_state(batch, capacity) for member in self.members),
            taken=jnp.zeros((len(self.members), batch), jnp.int32),
            hidden=waiting(self.width * self.wants_hidden),
            taps=waiting(self.width * len(self.taps)),
        )

    def prefill(
        self, params: Any, state: SetState, row: Array, tokens: Array, start: Array, count: Array, features: Features
    ) -> SetState:
        """Every member takes the chunk in; its last row also waits, because the first draft starts from it."""
        members = tuple(
            member.prefill(p, own, row, tokens, start, count, self._view(member, features))
            for member, p, own in zip(self.members, params, state.members, strict=True)
        )
        last = jnp.maximum(count - 1, 0)
        slot = (start + last) % self.ring

        def put(ring, rows):
            return None if ring is None else ring.at[row, slot].set(rows[0, last].astype(ring.dtype))

        return SetState(
            members=members,
            taken=state.taken.at[:, row].set(start + count),
            hidden=put(state.hidden, features.hidden),
            taps=put(state.taps, features.taps),
        )

    def keep(self, state: SetState, features: Features) -> SetState:
        """Rows were committed: they wait until each member that reads them drafts again."""
        live = jnp.arange(features.positions.shape[1]) < features.count[:, None]
        slots = jnp.where(live, features.positions % self.ring, self.ring)
        request = jnp.arange(slots.shape[0])[:, None]

        def put(ring, rows):
            return None if ring is None else ring.at[request, slots].set(rows.astype(ring.dtype), mode="drop")

        return dataclasses.replace(
            state, hidden=put(state.hidden, features.hidden), taps=put(state.taps, features.taps)
        )

    def draft(
        self, params: Any, state: SetState, context: Context, shape: DraftShape, waiting: int
    ) -> tuple[Draft, SetState]:
        """A draft by the member that `shape` names.

        Args:
            params: of each member.
            state: of the set.
            context: what is committed.
            shape: an entry of the menu.
            waiting: rows of a request that wait for the member, at most; one that reads no features has none.
        """
        index = self._index(shape.kind)
        member = self.members[index]
        taken = state.taken
        if self.reads_features(shape.kind):
            end = context.lengths - 1
            # The newest row is taken in again if nothing was committed since: its output is what drafts start from.
            start = jnp.clip(taken[index], 0, jnp.maximum(end - 1, 0))
            positions = start[:, None] + jnp.arange(waiting, dtype=jnp.int32)
            slots = (positions % self.ring)[:, :, None]
            features = Features(
                positions=positions,
                count=jnp.minimum(end - start, waiting),
                hidden=None if state.hidden is None else jnp.take_along_axis(state.hidden, slots, axis=1),
                taps=None if state.taps is None else jnp.take_along_axis(state.taps, slots, axis=1),
            )
            context = dataclasses.replace(context, features=self._view(member, features))
            taken = taken.at[index].set(jnp.where(context.active, end, taken[index]))
        drafted, memory = member.draft(params[index], state.members[index], context, shape)
        members = (*state.members[:index], memory, *state.members[index + 1 :])
        return drafted, dataclasses.replace(state, members=members, taken=taken)

    def finish(self, state: SetState, row: Array, tokens: Array, prompt_length: Array, length: Array) -> SetState:
        members = tuple(
            member.finish(own, row, tokens, prompt_length, length)
            for member, own in zip(self.members, state.members, strict=True)
        )
        return dataclasses.replace(state, members=members)

    def _index(self, kind: str) -> int:
        return next(i for i, member in enumerate(self.members) if member.kind == kind)

    def _view(self, member: Drafter, features: Features) -> Features:
        """The part of the set's features that a member reads."""
        taps = None
        if member.taps:
            assert features.taps is not None
            streams = features.taps.reshape(*features.taps.shape[:-1], len(self.taps), -1)
            own = [self.taps.index(tap) for tap in member.taps]
            taps = streams[..., jnp.array(own), :].reshape(*features.taps.shape[:-1], math.prod((len(own), self.width)))
        return dataclasses.replace(features, hidden=features.hidden if member.wants_hidden else None, taps=taps)


def menu_of(members: Sequence[Drafter]) -> tuple[DraftShape, ...]:
    """The shapes that are worth a program: of each member its own, and less deep ones where drafting them is cheaper.

    How many rows of a draft are verified is decided when it is there, so no shape differs from another in that alone.
    """
    menu: list[DraftShape] = []
    for member in members:
        own = member.shape
        menu.append(own)
        if isinstance(member, Recurrent):  # a pass of its head for each level
            levels = [depth for depth in (1, 2, 3) if depth < own.depth]
            if own.is_chain:
                menu += [DraftShape.chain(own.kind, depth) for depth in levels]
            else:
                k = own.branching
                menu += [
                    dataclasses.replace(own, depth=depth, rows=min(own.rows, 1 + k + (depth - 1) * k * k, 4 * depth))
                    for depth in levels[1:]
                ]
        elif isinstance(member, Hybrid) and isinstance(member.model, Recurrent) and member.model.shape.is_chain:
            left_out = [member.model.shape.depth - depth for depth in (1, 2, 3) if depth < member.model.shape.depth]
            menu += [dataclasses.replace(own, rows=own.rows - fewer) for fewer in left_out]
        elif isinstance(member, BlockDrafter) and own.is_chain and own.depth > 4:  # a shorter block has fewer rows
            menu.append(DraftShape.chain(own.kind, own.depth // 2))
    return tuple(menu)
