"""Tokenizers of folders and of GGUF metadata: what they add, how they cut words, what they refuse."""

import dataclasses
import json

import pytest

from specjax.weights.gguf_tokenizer import gguf_tokenizer
from specjax.weights.tokenizer import read_tokenizer

BYTES = [*(chr(c) for c in range(33, 127)), "Ġ", "Ċ"]


def byte_level(pre: str | None, merges=(), extra=(), **changes):
    """A tokenizer of single bytes and of what `merges` makes, cut by `pre`."""
    made = [left + right for left, right in merges]
    tokens = ["<end>", *BYTES, *made, *extra]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] + [1] * (len(tokens) - 1),
        "merges": [" ".join(pair) for pair in merges],
        "eos_token_id": 0,
    } | changes
    return gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None})


def words(tokenizer, text: str) -> list[str]:
    """How the text is cut before merging."""
    return [
        piece.replace("Ġ", " ").replace("Ċ", "\n")
        for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 1234 x=5\n\nend", ["It", "'s", " 1234", " x", "=", "5", "\n", "\n", "end"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "It'S 12345 (hi)\n\n  end", ["It", "'S", " ", "123", "45", " (", "hi", ")\n\n", " ", " end"]),
        ("qwen2", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("deepseek-r1-qwen", "a 123", ["a", " ", "1", "2", "3"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-coder", "if x12:\n", ["if", " x", "1", "2", ":", "\n"]),
    ],
)
def test_words_are_cut_as_the_file_says(pre, text, pieces):
    tokenizer = byte_level(pre)
    assert words(tokenizer, text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whole_words_need_no_merges_with_llama_bpe_alone():
    for pre, whole in [("llama-bpe", True), ("qwen2", False)]:
        tokenizer = byte_level(pre, extra=("cat",))
        assert (len(tokenizer.encode("cat")) == 1) == whole


def test_a_beginning_token_follows_the_file_and_the_kind():
    assert byte_level("llama-bpe", bos_token_id=0).encode("a")[0] == 0
    assert byte_level("llama-bpe", bos_token_id=0, add_bos_token=False).encode("a")[0] != 0
    assert byte_level("qwen2", bos_token_id=0).encode("a")[0] != 0
    assert byte_level("qwen2", bos_token_id=0, add_bos_token=True).encode("a")[0] == 0
    assert byte_level("qwen2", bos_token_id=0, add_bos_token=True).encode("a", add_special_tokens=False)[0] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "mystery"}, "pre-tokenizer 'mystery' is not known, so text would be cut wrongly"),
        ({"pre": None}, "pre-tokenizer None is not known"),
        ({"model": "t5"}, "tokenizer model 't5' is not known"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_unknown_tokenizers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        byte_level(**({"pre": "gpt-2"} | changes))


def test_fingerprints_are_of_the_vocabulary():
    merges = [("a", "b"), ("b", "c")]
    one, same = byte_level("gpt-2", merges), byte_level("qwen2", merges)
    other = byte_level("gpt-2", merges[::-1])
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert one.vocab_size == len(BYTES) + 3 and one.id_to_token(one.vocab_size) is None


def test_a_conversation_without_a_template_is_refused():
    with pytest.raises(ValueError, match="has no chat template"):
        byte_level("gpt-2").apply_chat_template([{"role": "user", "content": "hi"}])


def test_template_variables_and_plain_data():
    tokenizer = byte_level("gpt-2")
    tokenizer = dataclasses.replace(tokenizer, chat_template="{{ messages[0].content }}{{ thinking }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], thinking=True) == "hiTrue"
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template([{"role": "user", "content": object()}])
    unsafe = dataclasses.replace(tokenizer, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refused these messages"):
        unsafe.apply_chat_template([{"role": "user", "content": "hi"}])


def edit(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_folder_gives_roles_and_template(hf_folder):
    folder, _ = hf_folder()
    tokenizer = read_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.encode("<s>ab")[0] == 1
    (folder / "chat_template.jinja").write_text("from the file")
    assert read_tokenizer(folder).apply_chat_template([]) == "from the file"
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert read_tokenizer(edit(folder, chat_template=several)).apply_chat_template([]) == "yes"


def test_stated_beginning_and_end_tokens_win(hf_folder):
    folder, _ = hf_folder()
    assert read_tokenizer(folder).encode("ab") == [95]
    assert read_tokenizer(edit(folder, add_bos_token=True)).encode("ab") == [1, 95]
    both = read_tokenizer(edit(folder, add_eos_token=True))
    assert both.encode("ab") == [1, 95, 2] and both.encode("ab", add_special_tokens=False) == [95]
    with pytest.raises(ValueError, match="sets add_eos_token but names no eos_token"):
        read_tokenizer(edit(folder, eos_token=None))


def test_declared_tokens_are_added_or_refused(hf_folder):
    folder, _ = hf_folder()
    declared = {"96": {"content": "<tool>", "special": True}}
    tokenizer = read_tokenizer(edit(folder, added_tokens_decoder=declared))
    assert tokenizer.encode("<tool>") == [96] and tokenizer.vocab_size == 97
    with pytest.raises(ValueError, match="token '<tool>' has id 96 in tokenizer.json and 99"):
        read_tokenizer(edit(folder, added_tokens_decoder={"99": declared["96"]}))


def test_broken_folders(hf_folder):
    folder, _ = hf_folder()
    with pytest.raises(ValueError, match="eos_token '<none>' is not in the vocabulary"):
        read_tokenizer(edit(folder, eos_token="<none>"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="neither tokenizer.json nor tokenizer.model"):
        read_tokenizer(folder)
