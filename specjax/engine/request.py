"""What goes into the engine and what comes out of it, on the host."""

import dataclasses

from specjax.engine.state import Emitted
from specjax.sampling import SamplingParams


@dataclasses.dataclass
class SpecStats:
    """Speculation counters of one request, or pooled over several.

    Attributes:
        rounds: verify rounds, those without a proposal included. The first token comes from prefill, not from a round.
        drafted: drafted tokens that were verified (the root is not a draft).
        accepted: drafts that became output. The last token of a round counts as the target's own, also where an end
            token, a stop string or the budget cuts the run short, so tokens = rounds + accepted always.
        accepted_at: rounds in which at least `i + 1` drafts were accepted, by `i`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the target's own included; 1 for plain decoding, 0 where no round ran."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def per_position(self) -> list[float]:
        """Unconditional acceptance: share of rounds in which the first `i + 1` drafts were all accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    def add_round(self, drafted: int, accepted: int) -> None:
        """Count one round of one request."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def merge(self, other: "SpecStats") -> None:
        """Pool another request's counters into these."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count

    def to_dict(self) -> dict:
        """The `spec` object of the command line's JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "per_position": self.per_position,
        }


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock times of one request, compilation excluded once the engine is warm.

    Attributes:
        prefill_s: from insertion to the first token.
        decode_s: from the first token to the last.
        tokens: tokens generated.
    """

    prefill_s: float
    decode_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first, per second. 0 where there is only one."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else 0.0

    def to_dict(self) -> dict:
        """The `timing` object of the command line's JSON."""
        return {"prefill_s": self.prefill_s, "decode_s": self.decode_s, "tokens_per_s": self.tokens_per_s}


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one generated token under the target's raw softmax (before penalties and temperature).

    Attributes:
        token: the token's id.
        logprob: its log-probability.
        rank: 1 for the most likely token.
        top: the most likely ids with their log-probabilities; the chosen token is appended if it is not among them.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished request.

    Attributes:
        text: generated text, stop string excluded unless asked for.
        token_ids: generated tokens, an end token included.
        finish_reason: `stop` (end token or stop string) or `length` (budget or context end).
        prompt_tokens: tokens of the prompt.
        logprobs: one entry a token, if asked for.
        spec: speculation counters.
        timing: times.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None
    spec: SpecStats
    timing: Timing


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; `result` is set on the last one."""

    text: str
    token_ids: list[int]
    result: Result | None = None


@dataclasses.dataclass
class Request:
    """A request in the engine: prompt ids, parameters, and what has come out so far."""

    prompt: list[int]
    params: SamplingParams
    index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    spec: SpecStats = dataclasses.field(default_factory=SpecStats)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


def logprob_entries(emitted: Emitted, index: int, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Entries of the kept tokens: the `top` best, and the chosen one behind them if it is not among them."""
    lp = emitted.logprobs
    assert lp is not None
    entries = []
    for i, token in enumerate(tokens):
        chosen = float(lp.chosen[index, i])
        best = [(int(t), float(x)) for t, x in zip(lp.top_tokens[index, i][:top], lp.top[index, i][:top], strict=True)]
        if token not in (t for t, _ in best):
            best.append((token, chosen))
        entries.append(TokenLogprob(token=token, logprob=chosen, rank=int(lp.rank[index, i]), top=tuple(best)))
    return entries
