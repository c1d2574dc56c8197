"""Chat templates: Jinja source that ships with a checkpoint, rendered in a sandbox as transformers renders it."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> str:
    """Render a conversation.

    Args:
        template: the Jinja source.
        messages: `{"role": ..., "content": ...}` dictionaries, and what else the template reads. Keys whose value is
            None are dropped: templates test for presence.
        add_generation_prompt: end with the header of the assistant's answer.
        special_tokens: `bos_token` and the like, as the template names them.
        variables: further names that the template reads (`tools`, `enable_thinking`, ...).

    Raises:
        ValueError: the template is broken, or refuses the conversation (its own message is passed on).
        TypeError: a message holds something that is not JSON.
    """
    # Templates are code from a download: they see copies made of plain JSON types, never an object with methods.
    plain = json.loads(json.dumps([{k: v for k, v in message.items() if v is not None} for message in messages]))
    names = {"tools": None, "documents": None} | dict(special_tokens or {}) | json.loads(json.dumps(variables))
    try:
        return _compile(template).render(messages=plain, add_generation_prompt=add_generation_prompt, **names)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused these messages: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML, which a model was never shown."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
