"""Chat templates rendered as transformers renders them; what a stranger's template may not do."""

import copy
import datetime
import enum
import json

import pytest
from golden_files import GOLDEN
from toy_tokenizers import byte_level

from lorajax.chat_template import ChatTemplate
from lorajax.errors import RequestRejected
from lorajax.tokenizer import Tokenizer

CHAT = GOLDEN / "chat"
TEMPLATES = {path.stem: path.read_text() for path in (CHAT / "templates").iterdir()}
RENDERED = json.loads((CHAT / "cases.json").read_text())
MESSAGES = [{"role": "user", "content": "Hi"}]


def tokenizer_with(template) -> Tokenizer:
    special = RENDERED["special_tokens"]
    return Tokenizer(
        byte_level(),
        chat_template=template,
        bos_token=special["bos_token"],
        eos_token=special["eos_token"],
        special_tokens=special,
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_what_transformers_renders(template):
    tokenizer = tokenizer_with(TEMPLATES[template])
    cases = [case for case in RENDERED["cases"] if case["template"] == template]
    assert cases
    for case in cases:
        messages = RENDERED["conversations"][case["conversation"]]
        given, settings = copy.deepcopy(messages), {"add_generation_prompt": False, **case["settings"]}
        if "error" in case:
            with pytest.raises(RequestRejected) as caught:
                tokenizer.apply_chat_template(given, **settings)
            assert len(str(caught.value)) < 300
        else:
            assert tokenizer.apply_chat_template(given, **settings) == case["text"], case
        assert given == messages


def test_the_time_is_now():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    assert template.render(MESSAGES) in (before, datetime.datetime.now().strftime("%Y-%m-%d"))


def test_a_template_refuses_in_its_own_words():
    with pytest.raises(RequestRejected, match="refuses the messages: only one of us"):
        ChatTemplate("{{ raise_exception('only one of us') }}").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ('{0.__class__}').format(messages) }}",
        "{{ dict.__subclasses__() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as x %}",
    ],
)
def test_the_sandbox_holds(source):
    messages = copy.deepcopy(MESSAGES)
    try:
        text = ChatTemplate(source).render(messages)
    except RequestRejected:
        text = ""
    assert text == ""  # an undefined attribute renders as nothing
    assert messages == MESSAGES


class Role(enum.StrEnum):
    user = "user"

    def secret(self):
        raise AssertionError("a template called a method of the caller's object")


def test_templates_see_plain_values_only():
    template = ChatTemplate("{{ messages[0].role }}{{ messages[0].role.secret is defined }}{{ x | tojson }}")
    assert (
        template.render([{"role": Role.user, "content": ""}], x=(Role.user, 1.5)) == 'userFalse["user", 1.5]'
    )
    with pytest.raises(RequestRejected, match="holds a object"):
        template.render([{"role": "user", "content": object()}])


NO_CONVERSATIONS = [
    *([], "Hi", {"role": "user"}, 1, None),
    *([1], ["Hi"], [None], [{}], [{"content": "Hi"}], [{"role": 1}], [{"role": None}]),
]


@pytest.mark.parametrize("messages", NO_CONVERSATIONS, ids=repr)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(RequestRejected, match="role"):
        ChatTemplate(TEMPLATES["chatml"]).render(messages)


def test_a_template_for_tools_is_taken_for_tools():
    tokenizer = tokenizer_with({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "1 tools"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "0 tools"
    assert tokenizer_with("one").apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "one"


def test_without_a_template():
    with pytest.raises(RequestRejected, match="no chat template; pass a prompt"):
        tokenizer_with(None).apply_chat_template(MESSAGES)
    with pytest.raises(RequestRejected, match="named 'default', only rag, tool_use"):
        tokenizer_with({"tool_use": "t", "rag": "r"}).apply_chat_template(MESSAGES)


def test_a_broken_template_harms_only_those_who_use_it():
    tokenizer = tokenizer_with("{% if %}")
    assert tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(RequestRejected, match="not valid Jinja2"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_rendered_prompt_has_exactly_one_bos():
    tokenizer = tokenizer_with("{{ bos_token }}{{ messages[0].content }}")
    bos = tokenizer.bos_token_id
    text = tokenizer.apply_chat_template(MESSAGES)
    for add_special_tokens in (False, True):
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens).count(bos) == 1
