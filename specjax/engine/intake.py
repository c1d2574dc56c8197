"""What a request must be before it is queued, and how it enters a row of the batch."""

import dataclasses
from typing import Any

import numpy as np

from specjax import sampling
from specjax.config import RunConfig
from specjax.engine.layout import MAX_BIAS, MAX_EOS, Layout
from specjax.engine.prefill import Insertion
from specjax.engine.request import Request
from specjax.sampling import SamplingParams
from specjax.targets.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Intake:
    """Checks requests, and lays them out for the device.

    Attributes:
        config: of the engine.
        model: the target's architecture.
        tokenizer: ids to text, for stop strings and its end tokens; or None.
        layout: sizes of the state.
    """

    config: RunConfig
    model: DecoderConfig
    tokenizer: Any
    layout: Layout

    def request(self, ids: list[int], params: SamplingParams | None) -> Request:
        """A checked request that has no number yet, from the ids of its prompt.

        Raises:
            ValueError: an empty or too long prompt, or ids and parameters that do not fit the target.
        """
        params = params or SamplingParams()
        vocab = self.model.vocab_size
        if not ids:
            raise ValueError("the prompt is empty; decoding starts from at least one token")
        if min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(f"prompt ids must be in 0..{vocab - 1}, got {min(ids)}..{max(ids)}")
        if len(ids) >= self.config.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and context is {self.config.context}: "
                f"shorten it, or set context to at least {len(ids) + params.max_tokens} "
                f"(this target takes up to {self.model.max_position_embeddings})"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        self._eos(params)
        sampling.row_values(params, prompt_length=len(ids), vocab_size=vocab, max_bias=MAX_BIAS)
        return Request(prompt=ids, params=params, index=-1)

    def limit(self, request: Request) -> int:
        """Total tokens at which a request must end: its budget or the context, the smaller."""
        return min(len(request.prompt) + request.params.max_tokens, self.config.context)

    def insertion(self, request: Request, limit: int, pages: np.ndarray | None) -> Insertion:
        """A request as the device takes it, with the cache pages that it was given."""
        tokens = np.zeros((self.layout.capacity,), np.int32)
        tokens[: len(request.prompt)] = request.prompt
        params = request.params
        if params.seed is None and self.config.seed is not None:
            params = dataclasses.replace(params, seed=(self.config.seed + request.index) % 2**64)
        return Insertion(
            tokens=tokens,
            length=np.int32(len(request.prompt)),
            limit=np.int32(limit),
            eos=self._eos(params),
            sampling=sampling.row_values(
                params,
                prompt_length=len(request.prompt),
                vocab_size=self.model.vocab_size,
                max_bias=MAX_BIAS,
            ),
            pages=pages,
        )

    def idle(self, row: int | None = None) -> Insertion:
        """Shapes and dtypes of a real insertion, for warm-up and measurements; with pages of its own for a `row`."""
        pages = None
        if self.config.page_size is not None:
            own = np.arange(self.layout.row_pages, dtype=np.int32) + 1
            pages = np.zeros_like(own) if row is None else own + row * self.layout.row_pages
        return self.insertion(Request(prompt=[0], params=SamplingParams(seed=0), index=0), 1, pages)

    def _eos(self, params: SamplingParams) -> np.ndarray:
        """End tokens of a request, padded with -1."""
        model = () if params.ignore_eos else self.model.eos_token_ids
        own = self.tokenizer.eos_ids if self.tokenizer is not None and not params.ignore_eos else ()
        ids = sorted({*model, *own, *params.stop_token_ids})
        if len(ids) > MAX_EOS:
            raise ValueError(f"at most {MAX_EOS} end tokens a request, got {len(ids)}: {ids}")
        if ids and not 0 <= ids[0] <= ids[-1] < self.model.vocab_size:
            raise ValueError(f"end tokens must be in 0..{self.model.vocab_size - 1}, got {ids}")
        return np.array(ids + [-1] * (MAX_EOS - len(ids)), np.int32)
