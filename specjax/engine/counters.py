"""What an engine counts as it decodes: a few additions a round, read whenever somebody asks."""

import collections
import dataclasses
import time

from specjax.engine.request import Request, SpecStats


@dataclasses.dataclass
class Counters:
    """Since the engine was made or reset.

    Attributes:
        requests: started: prefilled, the first token out.
        finished: requests that are over, by reason: `stop`, `length`, or `abort`, whether it ran or waited.
        prompt_tokens: prefilled.
        tokens: generated, the first of each request included; what a stop string cuts off is not.
        rounds: of the batch.
        spec: rounds, drafts and accepted drafts of all requests, those that still run included.
        prefill_s: seconds of prefill, each request from its insertion to its first token.
        decode_s: seconds of rounds, from the end of prefill to the tokens on the host.
        full_s: of these, of rounds in which every row of the batch held a request.
        full_tokens: what such rounds generated.
    """

    requests: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    spec: SpecStats = dataclasses.field(default_factory=SpecStats)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    full_s: float = 0.0
    full_tokens: int = 0
    _full: bool = False
    _since: float = 0.0

    def begin(self) -> None:
        """Prefill is done, rounds begin."""
        self._since = time.perf_counter()

    def round(self, full: bool) -> None:
        """The tokens of a round are on the host; `full`: every row of the batch held a request."""
        now = time.perf_counter()
        self.rounds += 1
        self.decode_s += now - self._since
        self.full_s += (now - self._since) * full
        self._since, self._full = now, full

    def took(self, request: Request, kept: int, drafted: int | None) -> None:
        """`kept` tokens of a request came out of a round that verified `drafted` drafts of it; None: of its prefill."""
        self.tokens += kept
        if drafted is None:
            self.requests += 1
            self.prompt_tokens += len(request.prompt)
            self.prefill_s += request.first_token - request.started
        else:
            self.spec.add_round(drafted=drafted, accepted=kept - 1)
            self.full_tokens += kept * self._full

    @property
    def tokens_per_s(self) -> float:
        """Tokens of rounds per second of rounds, of all requests together; 0 before the first."""
        return (self.tokens - self.requests) / self.decode_s if self.decode_s > 0 else 0.0
