"""The engine: a target, a drafter and a batch of requests, decoded by compiled rounds.

    engine = Engine.load("smollm2-135m", drafter="ngram")
    result = engine.generate("Repeat: one two three.", SamplingParams(max_tokens=64))

The low level is `submit` and `step`; `generate` and `stream` are loops over them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.config import RunConfig
from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.planner import Planner
from specjax.costmodel.tables import Table
from specjax.draft import PLAIN
from specjax.drafters.base import Drafter
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine.accept import resolve_rule
from specjax.engine.counters import Counters
from specjax.engine.describe import describe
from specjax.engine.intake import Intake
from specjax.engine.layout import Layout
from specjax.engine.pilot import Pilot
from specjax.engine.pricing import priors
from specjax.engine.programs import Programs
from specjax.engine.prompt import Prompt, encode, is_single
from specjax.engine.request import Chunk, Request, Result, Timing, logprob_entries
from specjax.engine.scheduler import Scheduler
from specjax.engine.state import FINISH_REASON, RUNNING, Emitted, State
from specjax.engine.step import Stage
from specjax.engine.text import TextStream
from specjax.pallas_kernels import dispatch
from specjax.sampling import SamplingParams
from specjax.targets.decoder import Target, check_taps


class Engine:
    """Decodes requests with speculation. Make one with `Engine.load`, or from parts in tests and tools.

    One thread at a time: the state on the device is given away with every call.

    Args:
        target: the target's pure functions.
        params: its weights.
        tokenizer: text to ids and back (`specjax.weights.tokenizer.Tokenizer`), or None for ids only.
        drafter: the drafter, or None for plain decoding.
        drafter_params: its weights.
        config: batch, context, accept rule and so on; `target`, `drafter` and `dtype` of it describe what was loaded.
        table: what rounds cost; the planner of a `DrafterSet` decides by it.
        progress: called with `(program, done, total)` while programs are compiled.
        check: called with the engine before anything is compiled; what it raises ends the start.

    Raises:
        ValueError: a combination that cannot be honoured.
    """

    def __init__(
        self,
        target: Target,
        params: Any,
        *,
        tokenizer: Any = None,
        drafter: Drafter | None = None,
        drafter_params: Any = (),
        config: RunConfig | None = None,
        table: Table | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        check: Callable[["Engine"], None] | None = None,
    ):
        config = config or RunConfig()
        self.config, self.target, self.drafter = config, target, drafter
        self.params = {"target": params, "drafter": drafter_params}
        shape = drafter.shape if drafter is not None else PLAIN
        sampled = config.draft_sampling == "sampled"
        rule = resolve_rule(config.accept, shape, sampled)
        if drafter is not None and getattr(drafter, "sampled", False) != sampled:
            raise ValueError(
                f"draft_sampling is {config.draft_sampling!r}, but the {drafter.kind} drafter was built for "
                f"{'deterministic' if sampled else 'sampled'} drafts"
            )
        taps = drafter.taps if drafter is not None else ()
        check_taps(target.config, taps)
        dispatch.backends("tree_attention", config.kernels, jax.default_backend())  # refuses what there is not
        stage = Stage(target=target, drafter=drafter, shape=shape, rule=rule, taps=taps, kernels=config.kernels)
        self.layout = layout = Layout(config, shape.rows)
        dtype = jax.tree.leaves(params)[0].dtype
        self.programs = Programs(
            stage,
            config.batch,
            layout.prefill_sizes,
            config.device_rounds,
            lambda: layout.initial_state(stage, dtype),
        )
        self.intake = Intake(config, target.config, tokenizer, layout)
        self.scheduler = Scheduler(config.batch, config.page_size, layout.row_pages)
        self._texts: dict[int, TextStream] = {}
        self._mail: dict[int, deque[tuple[int, Chunk]]] = {}
        self._submitted = 0
        self._live: np.ndarray | None = None
        self.counters = Counters()
        self._table = table
        self.pilot = self._make_pilot()
        if check is not None:
            check(self)
        if config.warmup:
            self.warmup_s = self.programs.warm(self.params, self.intake.idle(), progress or (lambda *_: None))
        self._state: State = self.programs.initial()

    @classmethod
    def load(
        cls,
        config: RunConfig | str,
        *,
        quiet: bool = False,
        check: Callable[["Engine"], None] | None = None,
        **overrides: Any,
    ) -> "Engine":
        """Load a target and a drafter, compile, and be ready.

        Args:
            config: a run configuration, or a target's name (`smollm2-135m`, a folder, a GGUF file, a hub id).
            quiet: no progress bars.
            check: called with the engine before anything is compiled, e.g. to `check` prompts; what it raises ends it.
            **overrides: fields of `RunConfig`, e.g. `drafter="ngram"`, `batch=4`, `context=4096`.

        Raises:
            ConfigError: unknown or impossible options.
            ValueError: weights that do not load; all faults are listed.
        """
        from specjax.engine.load import load_engine

        return load_engine(cls, config, quiet=quiet, overrides=overrides, check=check)

    def with_drafter(self, drafter: Any, *, quiet: bool = True, **overrides: Any) -> "Engine":
        """Another engine on the same target weights with another drafter (a kind, a path, or a drafter's options)."""
        from specjax.engine.load import with_drafter

        return with_drafter(self, drafter, quiet=quiet, overrides=overrides)

    # ---------------------------------------------------------------- requests

    @property
    def tokenizer(self) -> Any:
        """Text to ids and back, or None."""
        return self.intake.tokenizer

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Prompt ids: messages and plain text go through the chat template, `raw` text and ids do not."""
        return encode(self.tokenizer, prompt, raw)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> int:
        """Queue a request; returns its id.

        Raises:
            ValueError: an empty or too long prompt, or ids and parameters that do not fit the target.
        """
        return self._enqueue(self.intake.request(self.encode(prompt, raw=raw), params))

    def check(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> None:
        """Raise what `submit` would for this request, without queueing it."""
        self.intake.request(self.encode(prompt, raw=raw), params)

    def abort(self, index: int) -> bool:
        """Drop a request that is waiting or running; its row and pages are free at once, the others do not notice.

        Returns:
            Whether there was such a request. One that has ended, was aborted before or never existed is none.
        """
        if not self.scheduler.forget(index):
            row = next((row for row, request in self.scheduler.running.items() if request.index == index), None)
            if row is None:
                return False
            self._release(row)
        self.counters.finished["abort"] += 1
        return True

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[tuple[int, Chunk]]:
        """Start what can start, then run one round; returns `(request id, chunk)` of everything that came out.

        Where `device_rounds` are configured, so many of them.
        """
        if self.config.device_rounds > 1:
            return self.run()
        events = self._admit()
        if not self.scheduler.running:
            return self._deliver(events)
        if self.pilot is not None:
            return self._deliver(events + self._piloted(self.pilot))
        live = self._draft() if self._live is None else self._live
        self._state, emitted = self.programs.verify(self.programs.fit(live), self.params, self._state)
        if self.drafter is not None:
            # Dispatched before the host looks, so that tokens and live lengths arrive together.
            self._state, drafted = self.programs.draft(self.params, self._state)
            emitted, self._live = jax.device_get((emitted, drafted))
            self._live = self._live.copy()
        else:
            emitted, self._live = jax.device_get(emitted), None
        return self._deliver(events + self._collect(emitted, live))

    def run(self, rounds: int | None = None) -> list[tuple[int, Chunk]]:
        """As `step`, but up to `rounds` rounds on the device before the host looks (`spec_steps`).

        Warm-up compiles this for `device_rounds` of the configuration, the default here; another number compiles when
        it is first asked for.
        """
        if self.pilot is not None:
            raise ValueError("a set of drafters is chosen from by the host, between rounds: use step")
        rounds = self.config.device_rounds if rounds is None else rounds
        events = self._admit()
        if not self.scheduler.running:
            return self._deliver(events)
        if self._live is None:
            self._draft()
        self._state, history, ran = self.programs.many(rounds, self.params, self._state)
        history, ran = jax.device_get((history, ran))
        self._live = None
        for index in range(int(ran)):
            emitted, live = jax.tree.map(lambda x, i=index: x[i], history)
            events += self._collect(emitted, live)
        return self._deliver(events)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> Any:
        """Decode one prompt to a `Result`, or a list of prompts (as a batch) to a list of them.

        Args:
            prompts: text, a list of messages, or ids; or a list of such.
            params: sampling parameters, one for all or one each.
            raw: text is not put through the chat template.
        """
        single = is_single(prompts)
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        found = list(self.results(batch, params, raw=raw))
        return found[0] if single else found

    def results(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> Iterator[Result]:
        """As `generate` of a list, but each result comes as soon as it and all before it are there."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        # All are checked before the first is queued.
        requests = [
            self.intake.request(self.encode(prompt, raw=raw), p) for prompt, p in zip(prompts, each, strict=True)
        ]
        waiting = deque(self._enqueue(request) for request in requests)
        done: dict[int, Result] = {}
        for index, chunk in self._chunks(list(waiting)):
            if chunk.result is not None:
                done[index] = chunk.result
            while waiting and waiting[0] in done:
                yield done.pop(waiting.popleft())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> Iterator[Chunk]:
        """Decode one prompt, yielding text as it is certain; the last chunk carries the `Result`."""
        for _, chunk in self._chunks([self.submit(prompt, params, raw=raw)]):
            yield chunk

    def reset(self) -> None:
        """Forget what requests have left behind (drafters' memories, counters, numbers, the planner's experience).

        Nothing is compiled.

        Raises:
            RuntimeError: requests are waiting or running.
        """
        if self.busy:
            raise RuntimeError("reset with requests waiting or running would lose them; finish them first")
        self._state, self._live, self._submitted = self.programs.initial(), None, 0
        self.counters = Counters()
        self.pilot = self._make_pilot()

    def describe(self) -> dict:
        """What this engine is made of."""
        return describe(self)

    # ---------------------------------------------------------------- inside

    def _enqueue(self, request: Request) -> int:
        request.index = self._submitted
        self._submitted += 1
        self.scheduler.waiting.append(request)
        return request.index

    def _chunks(self, wanted: Sequence[int]) -> Iterator[tuple[int, Chunk]]:
        """Step until the `wanted` requests have ended; their chunks."""
        mail: deque[tuple[int, Chunk]] = deque()
        self._mail |= dict.fromkeys(wanted, mail)
        open_requests = set(wanted)
        try:
            while open_requests:
                while not mail:
                    self.step()
                index, chunk = mail.popleft()
                if chunk.result is not None:
                    open_requests.remove(index)
                yield index, chunk
        finally:
            for index in wanted:
                del self._mail[index]
            for index in open_requests:  # nobody will read the rest
                self.abort(index)

    def _make_pilot(self) -> Pilot | None:
        if not isinstance(self.drafter, DrafterSet):
            return None
        if self._table is None:
            raise ValueError("a set of drafters needs a latency table to choose by; Engine.load finds one")
        if self.config.device_rounds > 1:
            raise ValueError("device_rounds must be 1 with a set of drafters: the host chooses between rounds")
        counts = sorted({width.count for width in self.programs.widths})
        menu, batch = self.drafter.menu, self.config.batch
        acceptance = Acceptance([shape for shape in menu if shape.depth], batch, priors(self.drafter))
        keeps = {"ring": self.drafter.ring, "room": self.drafter.room}
        planner = Planner(self._table, menu, counts, batch, scored=True, acceptance=acceptance, **keeps)
        return Pilot(planner, self.drafter, self.programs)

    def _piloted(self, pilot: Pilot) -> list[tuple[int, Chunk]]:
        """A round in the shape that the planner has chosen."""
        rows = np.array(sorted(self.scheduler.running))
        requests = self.scheduler.running.values()
        context = float(np.mean([len(request.prompt) + len(request.token_ids) for request in requests]))
        self._state, emitted, verified = pilot.round(self.params, self._state, rows, context)
        return self._collect(emitted, verified)

    def _deliver(self, events: list[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
        """Put the chunks that a `generate` or `stream` waits for into its mail, whoever ran the round; all of them."""
        for index, chunk in events:
            if index in self._mail:
                self._mail[index].append((index, chunk))
        return events

    def _draft(self) -> np.ndarray:
        """Live draft rows of every request, the root included; 0 for a row that runs nothing."""
        if self.drafter is None:
            return np.array([row in self.scheduler.running for row in range(self.config.batch)], np.int32)
        self._state, live = self.programs.draft(self.params, self._state)
        return np.array(live)

    def _admit(self) -> list[tuple[int, Chunk]]:
        """Insert and prefill whatever fits; the first token of each comes out."""
        events = []
        while self.scheduler.waiting:
            request = self.scheduler.waiting[0]
            limit = self.intake.limit(request)
            started = self.scheduler.admit(limit + self.programs.stage.shape.rows)
            if started is None:
                break
            row, request, pages = started
            request.started = time.perf_counter()
            self._texts[row] = TextStream.of(self.tokenizer, request.params)
            self._state = self.programs.insert(self._state, row, self.intake.insertion(request, limit, pages))
            emitted = None
            for start, size in self.programs.chunks(len(request.prompt)):
                self._state, emitted = self.programs.prefill(self.params, self._state, row, start, size)
            if self.pilot is not None:
                self.pilot.admitted(row, request.params.temperature)
            events += self._take(row, jax.device_get(emitted), 0, drafted=None)
            self._live = None
        self.counters.begin()
        return events

    def _collect(self, emitted: Emitted, live: np.ndarray) -> list[tuple[int, Chunk]]:
        """Hand the tokens of a round to their requests."""
        self.counters.round(full=len(self.scheduler.running) == self.config.batch)
        events = []
        for row in list(self.scheduler.running):
            if emitted.counts[row]:
                events += self._take(row, emitted, row, drafted=int(live[row]) - 1)
        return events

    def _take(self, row: int, emitted: Emitted, index: int, drafted: int | None) -> list[tuple[int, Chunk]]:
        """Tokens of one request: text, stop strings, counters; finish it where it ends."""
        request = self.scheduler.running[row]
        now = time.perf_counter()
        count = int(emitted.counts[index])
        delta = self._texts[row].push([int(t) for t in emitted.tokens[index][:count]])
        kept = delta.token_ids
        request.token_ids += kept
        request.text += delta.text
        if request.params.logprobs is not None:
            request.logprobs += logprob_entries(emitted, index, kept, request.params.logprobs)
        if drafted is None:
            request.first_token = now
        else:
            request.spec.add_round(drafted=drafted, accepted=len(kept) - 1)
        request.last_token = now
        self.counters.took(request, len(kept), drafted)
        finish = int(emitted.finish[index])
        if finish == RUNNING and not delta.finished:
            return [(request.index, Chunk(delta.text, kept))]
        reason = "stop" if delta.finished else FINISH_REASON[finish]
        return [(request.index, self._finish(row, delta.text, kept, reason, delta.finished))]

    def _finish(self, row: int, text: str, kept: list[int], reason: str, matched: bool) -> Chunk:
        if not matched:
            tail = self._texts[row].finish()
            text, self.scheduler.running[row].text = text + tail, self.scheduler.running[row].text + tail
        request = self._release(row)
        self.counters.finished[reason] += 1
        result = Result(
            text=request.text,
            token_ids=request.token_ids,
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            spec=request.spec,
            timing=Timing(
                prefill_s=request.first_token - request.started,
                decode_s=request.last_token - request.first_token,
                tokens=len(request.token_ids),
            ),
        )
        return Chunk(text, kept, result)

    def _release(self, row: int) -> Request:
        """Free a row, whether its request has ended or is given up."""
        request = self.scheduler.release(row)
        del self._texts[row]
        kept = len(request.prompt) + len(request.token_ids)
        self._state = self.programs.release(self._state, row, kept)
        if self._live is not None:
            self._live[row] = 0
        if self.pilot is not None:
            self.pilot.released(row)
        return request
