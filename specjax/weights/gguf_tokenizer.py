"""A tokenizer from the metadata of a GGUF file.

Two kinds occur with the decoders here: byte-level BPE (`tokenizer.ggml.model` "gpt2"), whose way of cutting text into
words is named by `tokenizer.ggml.pre`, and SentencePiece BPE ("llama"), whose merges follow from the pieces' scores.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specjax.weights import tokenizer as wrapper

# Token types of the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Words of GPT-4's tokenizer and its descendants; they differ in how many digits stay together.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")

# How each `tokenizer.ggml.pre` cuts: regular expressions applied one after the other, or GPT-2's built into ByteLevel,
# with or without single digits first.
_GPT2 = ("gpt2", "gpt-2", "default")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLITS = {
    "llama-bpe": (_GPT4 % "{1,3}",),
    "llama3": (_GPT4 % "{1,3}",),
    "llama-v3": (_GPT4 % "{1,3}",),
    "smaug-bpe": (_GPT4 % "{1,3}",),
    "qwen2": (_GPT4 % "",),
    "deepseek-r1-qwen": (_GPT4 % "",),
    "tekken": (_TEKKEN,),
    "deepseek-coder": _DEEPSEEK_CODER,
}
# A word that is a token as a whole is taken as one, merges or not; and a beginning token is added unless told not to.
_WHOLE_WORDS = _STARTED = ("llama-bpe", "llama3", "llama-v3", "tekken")
_COMPOSED = ("qwen2",)  # the text is brought to Unicode's NFC first


def gguf_tokenizer(metadata: Mapping[str, Any]) -> wrapper.Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ValueError: a kind of tokenizer, or a way of cutting words, that is not known; or missing metadata.
    """
    ggml = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    if missing := [key for key in ("model", "tokens") if key not in ggml]:
        raise ValueError(f"the GGUF file has no tokenizer: tokenizer.ggml.{missing[0]} is missing")
    if ggml["model"] == "gpt2":
        backend = _byte_level(ggml)
        started = ggml.get("pre") in _STARTED
    elif ggml["model"] == "llama":
        backend, started = _sentencepiece(ggml), True
    else:
        raise ValueError(f"GGUF tokenizer model {ggml['model']!r} is not known; known are 'gpt2' and 'llama'")
    tokens, kinds = ggml["tokens"], ggml.get("token_type") or []
    added = [
        (token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in added if kind != _USER_DEFINED]
    )
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in added if kind == _USER_DEFINED])

    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {role: tokens[ggml[f"{name}_token_id"]] for role, name in roles.items() if f"{name}_token_id" in ggml}
    bos = special.get("bos_token") if ggml.get("add_bos_token", started) else None
    eos = special.get("eos_token") if ggml.get("add_eos_token", False) else None
    if bos or eos:
        wrapper.bos_eos_processor(backend, bos, eos)
    return wrapper.Tokenizer(
        backend=backend,
        special_tokens=special,
        chat_template=metadata.get("tokenizer.chat_template"),
        eos_ids=(ggml["eos_token_id"],) if "eos_token_id" in ggml else (),
    )


def _byte_level(ggml: Mapping[str, Any]) -> Tokenizer:
    pre = ggml.get("pre")
    if pre not in (*_GPT2, *_DIGITS, *_SPLITS):
        known = ", ".join(sorted((*_GPT2, *_DIGITS, *_SPLITS)))
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not known, so text would be cut wrongly; known are {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", ())]
    vocabulary = {token: index for index, token in enumerate(ggml["tokens"])}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if pre in _SPLITS:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(ggml: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = ggml["tokens"], ggml.get("scores")
    if not scores or len(scores) != len(tokens):
        raise ValueError(f"a GGUF tokenizer of kind 'llama' needs a score for each of its {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(vocabulary, _merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # The blank before a text (and after a special token) that SentencePiece adds, and takes away when decoding.
    prefix = ggml.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if prefix else []),
        ]
    )
    return backend


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules of a scored vocabulary: every way to make a piece of two others, best-scored piece first.

    SentencePiece joins the neighbours whose union scores highest; BPE joins those whose rule comes first. Ranking the
    rules by their result's score makes the two the same.
    """
    rules = []
    for piece, index in vocabulary.items():
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        ways = [way for way in ways if way[0] in vocabulary and way[1] in vocabulary]
        ways.sort(key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
        rules += [(-scores[index], index, way) for way in ways]
    rules.sort(key=lambda rule: rule[0])
    return [way for _, _, way in rules]
