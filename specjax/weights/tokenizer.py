"""The tokenizer that the engine sees: text to ids and back, chat templates, and which ids end a text.

The work is done by a `tokenizers.Tokenizer` (Rust). It comes from `tokenizer.json` of a Hugging Face folder, from the
metadata of a GGUF file (`gguf_tokenizer.py`), or, where a folder has only a SentencePiece model, from transformers'
converter; transformers is imported in that last case alone, because importing it takes seconds.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from specjax.weights.chat_template import render_chat

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` and what it does not know about itself.

    Attributes:
        backend: the tokenizer proper; `tokenizers.decoders.DecodeStream` works on it.
        special_tokens: text of each role that exists (`bos_token`, `eos_token`, `unk_token`, `pad_token`).
        chat_template: Jinja source, if the checkpoint has one.
        eos_ids: ids that end a text; the loader puts those of the model's configuration here.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in the text are recognised, as everywhere in the field.

        Args:
            text: any string.
            add_special_tokens: also add those that the tokenizer puts around a text (a beginning token, mostly).
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, exactly as the pieces spell it: no clean-up of spaces. Ids past the vocabulary are empty."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary's spelling of an id (`Ġthe`), or None where no token has it."""
        return self.backend.id_to_token(index)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation (see `render_chat`). Encode the result with `add_special_tokens=False`, or use
        `encode_chat`: the template writes the special tokens itself.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template; give a plain text prompt instead of messages")
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            **variables,
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a rendered conversation."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **variables), False)

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning token, if there is one."""
        return (
            self.backend.token_to_id(self.special_tokens["bos_token"]) if "bos_token" in self.special_tokens else None
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's vocabulary may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def fingerprint(self) -> str:
        """A hash that two tokenizers share exactly when every id means the same token in both.

        A draft model must share its target's; how text is split does not enter, since drafts are made of ids.
        """
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        vocabulary = sorted((index, token) for token, index in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` (chat template included) into `folder`."""
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ValueError: no tokenizer file, a damaged one, or a configuration that contradicts it.
    """
    config = _read_json(folder / "tokenizer_config.json")
    for name, token in _read_json(folder / "special_tokens_map.json").items():
        config.setdefault(name, token)
    special = {role: _content(config[role]) for role in _ROLES if config.get(role)}
    if (folder / "tokenizer.json").exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        # Truncation and padding are saved by training scripts; a prompt is never cut or padded here.
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, config.get("added_tokens_decoder") or {}, folder)
        _set_bos(backend, config, special)
    else:
        backend = _convert_sentencepiece(folder)
    missing = {role: token for role, token in special.items() if backend.token_to_id(token) is None}
    for role in missing:
        if role in ("bos_token", "eos_token"):
            raise ValueError(f"{folder}: {role} {special[role]!r} is not in the vocabulary of tokenizer.json")
        del special[role]
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend=backend,
        special_tokens=special,
        chat_template=_chat_template(folder, config),
        eos_ids=() if eos is None else (eos,),
    )


def bos_eos_processor(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put `bos` before and `eos` after a text, where given."""
    tokens = [token for token in (bos, eos) if token is not None]
    head, tail = ([bos] if bos else []), ([eos] if eos else [])
    backend.post_processor = TemplateProcessing(
        single=[*head, "$A:0", *tail],
        pair=[*head, "$A:0", *tail, *(f"{token}:1" for token in head), "$B:1", *(f"{token}:1" for token in tail)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get("default")
    return template


def _add_missing(backend: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Tokens that tokenizer_config.json declares beyond those of tokenizer.json, in the order of their ids."""
    for index, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        token = fields["content"]
        if backend.token_to_id(token) is None:
            flags = {k: fields[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in fields}
            backend.add_tokens([tokenizers.AddedToken(token, **flags)])
        if backend.token_to_id(token) != int(index):
            raise ValueError(
                f"{folder}: token {token!r} has id {backend.token_to_id(token)} in tokenizer.json and {index} in "
                "tokenizer_config.json"
            )


def _set_bos(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Honour `add_bos_token` and `add_eos_token` where they say something else than tokenizer.json does."""
    stated = {role: config.get(f"add_{role}") for role in ("bos_token", "eos_token")}
    if all(value is None for value in stated.values()):
        return
    around = backend.encode("", add_special_tokens=True).tokens
    actual = {role: special.get(role) is not None and special[role] in around for role in stated}
    if all(value is None or value == actual[role] for role, value in stated.items()):
        return
    wanted = {role: actual[role] if value is None else value for role, value in stated.items()}
    for role, value in wanted.items():
        if value and role not in special:
            raise ValueError(f"tokenizer_config.json sets add_{role} but names no {role}")
    chosen = [special[role] if wanted[role] else None for role in ("bos_token", "eos_token")]
    level = backend.post_processor
    bos_eos_processor(backend, *chosen)
    if isinstance(level, tokenizers.processors.ByteLevel) and not any(chosen):
        backend.post_processor = level


def _convert_sentencepiece(folder: Path) -> tokenizers.Tokenizer:
    if not (folder / "tokenizer.model").exists():
        raise ValueError(f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model is there")
    from transformers import AutoTokenizer

    try:
        converted: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return converted.backend_tokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has a SentencePiece model only; `pip install sentencepiece protobuf` to convert it, or add "
            "tokenizer.json"
        ) from error
