"""vLLM's `--speculative-config`."""

import json

from specjax.config.drafters import ConfigError, DrafterConfig
from specjax.config.run import drafter, listed, nearest

_MODEL = {"num_speculative_tokens": "num_speculative_tokens", "model": "model"}
# vLLM's names of `--speculative-config`, by method: theirs -> ours.
_SPECULATIVE_KEYS = {
    "ngram": {
        "num_speculative_tokens": "num_speculative_tokens",
        "prompt_lookup_max": "prompt_lookup_max",
        "prompt_lookup_min": "prompt_lookup_min",
    },
    "suffix": {
        "num_speculative_tokens": "num_speculative_tokens",
        "suffix_decoding_max_tree_depth": "max_depth",
        "suffix_decoding_max_spec_factor": "max_spec_factor",
        "suffix_decoding_min_token_prob": "min_token_prob",
    },
    "draft_model": _MODEL,
    "eagle3": _MODEL,
    "p_eagle": _MODEL,
    "mtp": _MODEL,
    "dflash": _MODEL,
    "dspark": _MODEL,
}
# Our kind where it has another name, and what makes a drafter draft as it does there: in chains.
_KINDS = {"p_eagle": "peagle"}
_FIXED = {"eagle3": {"topk": 1}, "mtp": {"topk": 1}}


def from_speculative_config(text: str) -> DrafterConfig:
    """A drafter from the JSON that vLLM's `--speculative-config` takes.

    As there, one of `prompt_lookup_min` and `prompt_lookup_max` alone sets both, and `model` alone means `draft_model`
    (which loads a learned drafter too, if that is what the model is).

    Raises:
        ConfigError: not a JSON object, an unknown method or key (with the nearest known one), a wrong type.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the speculative config is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"the speculative config must be a JSON object, got {text!r}")
    if "method" not in given and "model" not in given:
        known = ", ".join(_SPECULATIVE_KEYS)
        raise ConfigError(f"the speculative config needs a 'method' ({known}), or the 'model' of a drafter")
    method = given.pop("method", "draft_model")
    if method not in _SPECULATIVE_KEYS:
        raise ConfigError(f"unknown method {method!r}{nearest(str(method), _SPECULATIVE_KEYS, 'methods')}")
    names = _SPECULATIVE_KEYS[method]
    unknown = [key for key in given if key not in names]
    if unknown:
        faults = [f"unknown key '{key}' for method '{method}'{nearest(key, names, 'keys')}" for key in unknown]
        raise ConfigError(listed(faults, "the speculative config"))
    options = {names[key]: value for key, value in given.items()}
    bounds = {"prompt_lookup_min", "prompt_lookup_max"} & options.keys()
    if len(bounds) == 1:
        options |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), options[bounds.pop()])
    return drafter({"kind": _KINDS.get(method, method), **_FIXED.get(method, {}), **options})
