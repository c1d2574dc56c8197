"""`specjax generate`: text from one prompt or from a file of prompts."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specjax.cli import explain, flags, prompts
from specjax.cli.prompts import Conversation

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.engine.request import Result
    from specjax.sampling import SamplingParams

HELP = """Generate text from a prompt, or from a file of prompts.

  specjax generate "Write a haiku about trees."
  specjax generate --drafter ngram --json "Repeat after me: one, two, three."
  specjax generate - < letter.txt
  specjax generate --config configs/suffix.yaml -o drafter.max_depth=16 "Hello"
  specjax generate --prompts configs/prompts/demo.jsonl --batch 4 --json > answers.jsonl

The text (or JSON) goes to stdout, everything else to stderr."""


@dataclasses.dataclass(kw_only=True)
class Generate(flags.SamplingFlags, flags.DrafterFlags):
    """Flags of `specjax generate`."""

    prompt: Annotated[tyro.conf.Positional[str | None], flags.text("PROMPT")] = None
    """The prompt; - reads it from stdin."""
    prompts: Annotated[str | None, flags.text("FILE.jsonl")] = None
    """A line a conversation: {"turns": [...]}, {"messages": [...]} or {"prompt": "..."}."""
    raw: bool = False
    """Take the prompt as it is, without the chat template."""
    json: bool = False
    """Print a JSON object an answer, with usage, speculation and timing, and of --prompts its line and turn. In `spec`,
    `per_position` is the share of rounds in which the first, the second, ... draft was accepted."""
    explain: bool = False
    """With drafter auto: say what its planner expected of the rounds, what they were, and each change of shape."""
    metrics: Annotated[str | None, flags.text("FILE.prom")] = None
    """Write what the engine and its planner have counted here, in Prometheus' text format."""
    stream: bool = False
    """Print text as it comes, even where stdout is no terminal."""
    no_stream: bool = False
    """Print text at the end, even on a terminal."""

    def run(self) -> int:
        """Decode and print; the exit code."""
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give a prompt, or --prompts FILE, and not both; - reads a prompt from stdin")
        if self.logprobs is not None and not self.json:
            raise ValueError("--logprobs are reported in JSON alone: add --json")
        if self.stream and (self.json or self.prompts or self.no_stream):
            raise ValueError("--stream shows one text as it comes; leave --json, --prompts and --no-stream out")
        run, params = self.run_config(self.named_drafter()), self.params()
        if self.explain and run.drafter.kind != "auto":
            raise ValueError(f"--explain is about a planner, and drafter '{run.drafter.kind}' has none: use 'auto'")
        flags.check_outputs(self.metrics)
        if self.prompts is not None:
            conversations = prompts.read(self.prompts)
        else:
            text = _stdin() if self.prompt == "-" else self.prompt
            if not text:
                raise ValueError("the prompt is empty")
            conversations = [Conversation((text,))]
        engine = flags.load_engine(
            run, quiet=False, check=lambda made: prompts.check(made, conversations, params, raw=self.raw)
        )
        streams = self.stream or (sys.stdout.isatty() and not (self.json or self.no_stream or self.prompts))
        if streams:
            result = stream(engine, conversations[0].turns[0], params, raw=self.raw)
            flags.note(summary(result))
            self._account(engine)
            return 0
        for conversation, turn, result in prompts.answered(engine, conversations, params, raw=self.raw):
            found = to_dict(result)
            if self.prompts is not None:
                found |= {"line": conversation.line, "turn": turn}
            print(json.dumps(found, ensure_ascii=False) if self.json else result.text, flush=True)
            flags.note(summary(result))
        self._account(engine)
        return 0

    def _account(self, engine: "Engine") -> None:
        flags.write_metrics(self.metrics, {engine.describe()["drafter"]: engine})
        if self.explain and engine.pilot is not None:
            flags.note("\n".join(explain.lines(engine.pilot.report())))


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8") if hasattr(sys.stdin, "buffer") else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8: {error}") from None


def stream(engine: "Engine", prompt: Any, params: "SamplingParams", *, raw: bool = False) -> "Result":
    """Print the text of one request as it comes, and a line end."""
    result = None
    for chunk in engine.stream(prompt, params, raw=raw):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        result = chunk.result
    print(flush=True)
    assert result is not None, "a stream ends with its result"
    return result


def to_dict(result: "Result") -> dict[str, Any]:
    """The JSON object of an answer; `logprobs` only where they were asked for."""
    completion = len(result.token_ids)
    answer: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": result.prompt_tokens + completion,
        },
        "spec": result.spec.to_dict(),
        "timing": result.timing.to_dict(),
    }
    if result.logprobs is not None:
        answer["logprobs"] = [dataclasses.asdict(entry) for entry in result.logprobs]
    return answer


def summary(result: "Result") -> str:
    """One line about an answer."""
    return (
        f"[{result.prompt_tokens} + {len(result.token_ids)} tokens, {result.finish_reason}; "
        f"{result.timing.tokens_per_s:.1f} tokens/s; acceptance length {result.spec.acceptance_length:.2f} "
        f"over {result.spec.rounds} rounds]"
    )
