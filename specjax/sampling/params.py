"""What one request may ask for, checked on the host."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

MAX_LOGPROBS = 20
MAX_BIAS = 300
SMALLEST = float(np.finfo(np.float32).tiny)  # the device computes in float32, where less than this is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Every field can come from JSON or from a command line; lists become tuples.

    Attributes:
        max_tokens: most tokens to generate, the end token included.
        temperature: divides the logits; 0 takes the argmax (lowest id on ties) and makes the filters irrelevant.
        top_k: keep the k largest logits, 0 = off. Logits equal to the k-th are all kept.
        top_p: keep the fewest tokens, most probable first, that hold this much of the mass (after top-k); 1 = off.
            Tokens exactly as probable as the last one kept are kept too.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 = off.
        repetition_penalty: divides the logits > 0 of the tokens in prompt and output, multiplies the others; 1 = off.
        presence_penalty: subtracted from the logit of every token generated so far (the prompt does not count).
        frequency_penalty: subtracted once per occurrence among the generated tokens (the prompt does not count).
        logit_bias: token id to a value added to its logit, at most 300 of them.
        min_tokens: end tokens cannot be drawn before this many tokens have been generated.
        seed: 64-bit seed; the same seed gives the same text, alone or in a batch. None draws a fresh one.
        stop: strings that end the text; a single string is taken as one.
        stop_token_ids: token ids that end the text, beside the model's own.
        include_stop: keep the matched stop string in the text.
        ignore_eos: go on past the model's end tokens.
        logprobs: report the log-probability of each token and of this many most likely ones (0: of the token alone).
            They are the raw log-softmax, before bias, penalties, temperature and filters. None = off.

    Raises:
        ValueError: a value is out of its range; the message names the field, the value and the range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        for name, wanted in (("stop", "a string or a list of strings"), ("stop_token_ids", "a list of ids")):
            _require(name, getattr(self, name), isinstance(getattr(self, name), str | Sequence), wanted)
        for name in ("include_stop", "ignore_eos"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        _require("logit_bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping of ids to numbers")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # JSON has no integer keys.
        object.__setattr__(self, "logit_bias", {_integer("logit_bias id", k): v for k, v in self.logit_bias.items()})

        _require("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        _require("temperature", self.temperature, _finite(self.temperature) and self.temperature >= 0, "finite, >= 0")
        _require("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 = off)")
        _require("top_p", self.top_p, _finite(self.top_p) and SMALLEST <= self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, _finite(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, _finite(penalty) and penalty >= SMALLEST, "finite, > 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), _finite(getattr(self, name)), "finite")
        for token, value in self.logit_bias.items():
            _require(f"logit_bias[{token}]", value, _finite(value), "finite")
        if len(self.logit_bias) > MAX_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIAS} are taken")
        _require("min_tokens", self.min_tokens, _is_int(self.min_tokens) and self.min_tokens >= 0, "an integer >= 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            check_seed(self.seed)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be non-empty strings, got {text!r}: it would match everywhere")
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, _is_int(token), "integers")
        valid = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _require("logprobs", self.logprobs, valid, f"None or an integer in 0..{MAX_LOGPROBS}")


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_seed(seed: int) -> None:
    """Refuse what is no 64-bit seed."""
    _require("seed", seed, _is_int(seed) and 0 <= seed < 2**64, "an integer in 0..2**64 - 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    return number and abs(float(value)) <= float(np.finfo(np.float32).max)


def _integer(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{name} must be a token id, got {value!r}") from None
