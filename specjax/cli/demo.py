"""`specjax demo`: one prompt, decoded plainly and with drafts; the same text, sooner."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from specjax.cli import flags
from specjax.cli.generate import stream
from specjax.config import NoDrafter

if TYPE_CHECKING:
    from specjax.engine.request import Result

HELP = """Decode one prompt plainly and with drafts, side by side.

  specjax demo
  specjax demo --drafter suffix --max-tokens 64

Exit code 1 if the two differ in a single token."""

PROMPT = """Copy this note word for word, but write "Friday" instead of "Thursday".

The workshop opens on Thursday at nine. Please bring the blue folder, the measuring tape and two sharp pencils. \
Lunch is served at noon in the small kitchen. In the afternoon we cut the boards, sand the edges and paint the first \
coat. The workshop closes on Thursday at five, and the paint dries over night."""


@dataclasses.dataclass(kw_only=True)
class Demo(flags.EngineFlags):
    """Flags of `specjax demo`."""

    drafter: Annotated[str, flags.text("KIND|PATH")] = "ngram"
    """What drafts."""
    prompt: Annotated[str, flags.text("TEXT")] = PROMPT
    """What to answer; copying and editing suit drafts from the prompt."""
    max_tokens: Annotated[int, flags.text("N")] = 128
    """Most tokens to generate."""

    def run(self) -> int:
        """Decode twice and compare; 1 if the tokens differ."""
        from specjax.sampling import SamplingParams

        params, run = SamplingParams(max_tokens=self.max_tokens), self.run_config(self.drafter)
        if run.drafter.kind == "none":
            raise ValueError("--drafter none would compare plain decoding with itself; name a drafter")
        plain_engine = flags.load_engine(run.model_copy(update={"drafter": NoDrafter()}), quiet=False)
        flags.note(f"{run.drafter.kind}: compiling")
        drafting_engine = plain_engine.with_drafter(run.drafter)
        print(f"> {self.prompt}\n\n--- plain", flush=True)
        plain = stream(plain_engine, self.prompt, params)
        print(f"\n--- {run.drafter.kind}", flush=True)
        drafted = stream(drafting_engine, self.prompt, params)
        print(f"\n{compare(plain, drafted, run.drafter.kind)}", flush=True)
        return 0 if plain.token_ids == drafted.token_ids else 1


def compare(plain: "Result", drafted: "Result", name: str) -> str:
    """Speeds, acceptance, and whether the tokens are the same."""
    before, after = plain.timing.tokens_per_s, drafted.timing.tokens_per_s
    ratio = f"{after / before:.2f} times plain" if before and after else "too short to compare"
    same = plain.token_ids == drafted.token_ids
    shares = "  ".join(f"{share:.2f}" for share in drafted.spec.per_position) or "nothing accepted"
    return "\n".join(
        [
            f"plain              {before:7.1f} tokens/s over {len(plain.token_ids)} tokens",
            f"{name:<18} {after:7.1f} tokens/s over {len(drafted.token_ids)} tokens: {ratio}",
            f"acceptance length  {drafted.spec.acceptance_length:7.2f} tokens a round, of {drafted.spec.rounds} rounds",
            f"by position        {shares}",
            f"same tokens        {'yes' if same else 'NO'}",
        ]
    )
