"""Chat templates from the inside."""

import dataclasses

import pytest
from support.chat import BEGIN, END, letters

from specjax.training.chat import UserTurn, next_turn


def test_the_frame_of_the_users_words():
    tokenizer = letters()
    frame = UserTurn.of(tokenizer)
    assert tokenizer.decode(frame.opening, skip_special_tokens=False) == "<u>u:"
    assert frame.opening[0] == BEGIN
    assert (frame.stop_ids, frame.stop) == ((END,), ())


def test_a_frame_without_special_tokens_ends_by_its_text():
    tokenizer = dataclasses.replace(
        letters(), chat_template="{% for m in messages %}q: {{ m.content }}\na: {% endfor %}"
    )
    frame = UserTurn.of(tokenizer)
    assert (frame.stop_ids, frame.stop) == ((), ("\na:",))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[0].content | upper | urlencode }}"])
def test_a_template_without_a_frame_is_refused(template):
    with pytest.raises(ValueError, match="does not show where"):
        UserTurn.of(dataclasses.replace(letters(), chat_template=template))


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_and_the_next_turn_are_what_the_template_shows(ends):
    tokenizer = letters()
    messages = [{"role": "user", "content": "hi"}]
    answer = [*tokenizer.encode("well"), *([END] if ends else [])]
    more = next_turn(tokenizer, messages, answer, "go on")
    whole = [*messages, {"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]
    assert [*tokenizer.encode_chat(messages), *answer, *more] == tokenizer.encode_chat(whole)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = dataclasses.replace(letters(), chat_template=last)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        next_turn(tokenizer, [{"role": "user", "content": "hi"}], [1], "more")
