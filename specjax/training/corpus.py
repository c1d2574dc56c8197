"""A corpus: dialogues that a target wrote, on disk and in memory.

A folder holds `manifest.json`, compressed shards of dialogues (`shard-*.npz`), and, while one is being written,
`pending.jsonl`: finished dialogues that are in no shard yet. Shards and manifest appear whole or not at all, so a
process may be killed at any moment; the shards that the manifest names are the corpus.
"""

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from specjax.weights.load import Checkpoint

FORMAT = 1
MANIFEST = "manifest.json"
_SAMPLES = 64  # values of each tensor that the digest of a target reads


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose dialogues these are.

    Attributes:
        target: the name that the target was loaded by; for messages, not compared.
        target_digest: of its weights.
        tokenizer_digest: of its vocabulary (`Tokenizer.fingerprint`).
        vocab_size: ids are below this.
    """

    target: str
    target_digest: str
    tokenizer_digest: str
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: "Checkpoint") -> "Origin":
        """The origin of what this model writes.

        The digest reads shapes and a sample of each tensor, rounded to bfloat16: it costs no pass over the weights, and
        a model stays itself in another file format or float type.
        """
        import ml_dtypes

        found = hashlib.sha256()
        for name in sorted(checkpoint.tensors):
            tensor = checkpoint.tensors[name]
            flat = tensor.reshape(-1)
            sample = flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES]
            found.update(f"{name} {tensor.shape}".encode())
            found.update(sample.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes())
        return cls(
            target=checkpoint.source.name,
            target_digest=found.hexdigest(),
            tokenizer_digest=checkpoint.tokenizer.fingerprint(),
            vocab_size=checkpoint.config.vocab_size,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Dialogue:
    """One dialogue.

    Attributes:
        tokens: int32 `[t]`, chat template included.
        mask: bool `[t]`, true on the tokens that the target wrote as the assistant, its end token included.
        temperature: of its answers.
        prompt: a digest of what the user says (`prompts.digest`).
        number: its place among the dialogues that were tried; those that a filter dropped leave gaps.
    """

    tokens: np.ndarray
    mask: np.ndarray
    temperature: float = 0.0
    prompt: int = 0
    number: int = 0


class Corpus:
    """Dialogues in memory: `corpus[i]` is `(tokens, mask)`, int32 and bool arrays of one length.

    Attributes:
        origin: the target that wrote them.
        folder: where they were read from, or None.
    """

    def __init__(self, dialogues: Sequence[Dialogue], origin: Origin, folder: Path | None = None):
        self.dialogues, self.origin, self.folder = list(dialogues), origin, folder

    @classmethod
    def open(cls, path: str | os.PathLike, origin: Origin | None = None) -> "Corpus":
        """Read a corpus, also one that is still being written: what its manifest names at this moment.

        Args:
            path: the folder.
            origin: the target that it must be of; None takes any.

        Raises:
            ValueError: no corpus, a damaged one, or the corpus of another target; the message names both.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        found = Origin(**manifest["origin"])
        if origin is not None:
            check_origin(folder, found, origin)
        dialogues = [d for shard in manifest["shards"] for d in read_shard(folder, shard, found.vocab_size)]
        return cls(dialogues, found, folder)

    def __len__(self) -> int:
        return len(self.dialogues)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.dialogues[i].tokens, self.dialogues[i].mask

    @property
    def tokens(self) -> int:
        """Tokens in all, prompts and chat template included."""
        return sum(len(d.tokens) for d in self.dialogues)

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target wrote: those with the mask set."""
        return sum(int(d.mask.sum()) for d in self.dialogues)

    def split(self, held_out_fraction: float, seed: int = 0) -> tuple["Corpus", "Corpus"]:
        """`(training, held_out)`: which side a dialogue is on depends on its prompt and the seed alone.

        A corpus that has grown therefore keeps every earlier dialogue on its side. Both sides hold at least one.

        Raises:
            ValueError: a fraction outside (0, 1), or fewer than two dialogues.
        """
        if not 0 < held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be between 0 and 1, got {held_out_fraction}")
        if len(self) < 2:
            raise ValueError(f"a corpus of {len(self)} dialogue(s) cannot be split")
        rank = np.array([_unit(d.prompt, d.number, seed) for d in self.dialogues])
        out = rank < min(max(held_out_fraction, np.nextafter(rank.min(), 1)), rank.max())
        sides = [[d for d, held in zip(self.dialogues, out, strict=True) if held == side] for side in (False, True)]
        return Corpus(sides[0], self.origin, self.folder), Corpus(sides[1], self.origin, self.folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a corpus.

    Raises:
        ValueError: there is none, or it is of another format version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no corpus: {MANIFEST} cannot be read ({error})") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder} is of corpus format {manifest.get('format')}, and this specjax reads {FORMAT}")
    return manifest


def check_origin(folder: Path, found: Origin, wanted: Origin) -> None:
    """Refuse the corpus of another target.

    Raises:
        ValueError: the weights or the vocabularies differ.
    """
    if dataclasses.replace(found, target="") == dataclasses.replace(wanted, target=""):
        return
    shown = [
        f"{o.target} (weights {o.target_digest[:12]}, tokenizer {o.tokenizer_digest[:12]})" for o in (found, wanted)
    ]
    raise ValueError(
        f"{folder} was written by {shown[0]}, not by {shown[1]}: a drafter must learn from its own target's answers. "
        "Generate a corpus for this target, in another folder"
    )


def write_shard(folder: Path, index: int, dialogues: Sequence[Dialogue], vocab_size: int) -> dict[str, Any]:
    """Write a shard; its entry in the manifest."""
    tokens = np.concatenate([d.tokens for d in dialogues])
    mask = np.concatenate([d.mask for d in dialogues])
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens=tokens.astype(_token_dtype(vocab_size)),
        mask=np.packbits(mask),
        lengths=np.array([len(d.tokens) for d in dialogues], np.int32),
        temperatures=np.array([d.temperature for d in dialogues], np.float64),
        prompts=np.array([d.prompt for d in dialogues], np.uint64),
        numbers=np.array([d.number for d in dialogues], np.int32),
    )
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    name = f"shard-{index:05d}-{digest[:8]}.npz"  # never that of a shard that the manifest names and that it replaces
    write_whole(folder / name, data)
    return {
        "file": name,
        "dialogues": len(dialogues),
        "tokens": len(tokens),
        "answer_tokens": int(mask.sum()),
        "sha256": digest,
    }


def read_shard(folder: Path, shard: Mapping[str, Any], vocab_size: int) -> list[Dialogue]:
    path = folder / shard["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{folder} is incomplete: {error}") from None
    if hashlib.sha256(data).hexdigest() != shard["sha256"]:
        raise ValueError(f"{path} is damaged: its bytes are not those that {MANIFEST} was written for")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        tokens, lengths = arrays["tokens"].astype(np.int32), arrays["lengths"]
        mask = np.unpackbits(arrays["mask"], count=len(tokens)).astype(bool)
        rows = zip(arrays["temperatures"].tolist(), arrays["prompts"].tolist(), arrays["numbers"].tolist(), strict=True)
        facts = list(rows)
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(f"{path} holds token {tokens.max()}, and the vocabulary has {vocab_size}")
    ends = np.cumsum(lengths)
    return [
        Dialogue(tokens[end - n : end], mask[end - n : end], *fact)
        for n, end, fact in zip(lengths, ends, facts, strict=True)
    ]


def _token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _unit(prompt: int, number: int, seed: int) -> float:
    """A number in [0, 1) that belongs to a dialogue."""
    key = f"{seed} {prompt or number}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:7], "big") / 2**56
