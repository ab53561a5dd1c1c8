"""What a request may ask of the renderer: to go on with the last message, documents, a template of its own."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import RequestError
from octavo.renderers import ChatRenderer
from octavo.renderers.template_cache import TemplateCache
from octavo.tokenizers import Tokenizer, load_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS = CHATML.replace("message.content", "message.content.strip()")
TRIMS_AND_THINKS = CHATML.replace("message.content", "(message.content.split('</think>') | last | trim)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[1]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def talk(last: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]


# going on with the last message --------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, STRIPS, TRIMS_AND_THINKS])
@pytest.mark.parametrize(
    "last", ["Once upon", "Once upon ", "Once\n\n", "x <|im_end|>", "hi", "", "</think>x", "<|im_"]
)
def test_the_prompt_ends_with_the_last_message_to_the_character(tokenizer: Tokenizer, template: str, last: str) -> None:
    rendered = ChatRenderer(tokenizer, template).render(talk(last), continue_final_message=True)
    shown = last.split("</think>")[-1] if template is TRIMS_AND_THINKS else last
    assert rendered.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + shown
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text
    specials = [token for token in rendered.token_ids if token in tokenizer.special_token_ids]
    assert specials == [0, 1, 0]  # none is the user's


@pytest.mark.parametrize("template", [CHATML, STRIPS])
def test_where_nothing_is_stripped_transformers_goes_on_in_the_same_way(
    folder: Path, tokenizer: Tokenizer, template: str
) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        talk("Once upon"), chat_template=template, tokenize=False, continue_final_message=True
    )
    assert ChatRenderer(tokenizer, template).render(talk("Once upon"), continue_final_message=True).text == expected


def test_control_without_it_the_message_is_closed(tokenizer: Tokenizer) -> None:
    rendered = ChatRenderer(tokenizer, CHATML).render(talk("Once upon"), add_generation_prompt=False)
    assert rendered.text.endswith("Once upon<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "last"),
    [
        ("{{ messages[0].content }}", {"role": "assistant", "content": "x"}),
        (CHATML, {"role": "assistant", "tool_calls": [{"id": "1"}]}),
    ],
    ids=["the template leaves it out", "it has no text"],
)
def test_what_cannot_be_gone_on_with_is_refused(tokenizer: Tokenizer, template: str, last: dict[str, Any]) -> None:
    renderer = ChatRenderer(tokenizer, template)
    with pytest.raises(RequestError, match="continue_final_message") as caught:
        renderer.render([{"role": "user", "content": "hi"}, last], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


# a template of the request's own -------------------------------------------------------------------------------------


def test_a_sent_template_is_used_for_its_request_alone(tokenizer: Tokenizer) -> None:
    renderer = ChatRenderer(tokenizer, CHATML)
    assert renderer.render(talk("x"), chat_template="<|im_start|>{{ messages | length }}").token_ids[0] == 0
    assert renderer.render(talk("x")).text.startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", r"not valid \(line 1\)"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{{ raise_exception('no') }}", "refuses"),
        ("{{ 'a' * 10**10 }}", "beyond"),
        ("x" * 70_000, "at most 65536 characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not valid"),
        ("{% if true %}" * 500 + "{% endif %}" * 500, "not valid"),
    ],
    ids=lambda value: value[:20],
)
def test_a_sent_template_that_is_no_good_is_the_clients_mistake(tokenizer: Tokenizer, template: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        ChatRenderer(tokenizer, CHATML).render(talk("x"), chat_template=template)
    assert caught.value.param == "chat_template"


def test_the_compiled_templates_that_are_kept_are_few() -> None:
    cache = TemplateCache()
    first = cache.get("0")
    assert cache.get("0") is first
    for number in range(100):
        cache.get(str(number))
    assert len(cache) == 32
    assert cache.get("0") is not first


# documents and other variables ---------------------------------------------------------------------------------------


def test_documents_are_a_variable_whose_text_is_text(tokenizer: Tokenizer) -> None:
    renderer = ChatRenderer(tokenizer, "{% for d in documents %}{{ d.title }}: {{ d.text }};{% endfor %}<|im_end|>")
    documents = [{"title": "a", "text": "<|im_end|>"}, {"title": "b", "text": "c"}]
    rendered = renderer.render(talk("x"), template_kwargs={"documents": documents})
    assert rendered.text == "a: <|im_end|>;b: c;<|im_end|>"
    assert rendered.token_ids.count(1) == 1


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"documents": [{"text": {1}}]}, "documents"), ({"thinking": {1}}, "chat_template_kwargs")],
)
def test_a_variable_that_is_no_json_names_its_field(tokenizer: Tokenizer, settings: Any, param: str) -> None:
    with pytest.raises(RequestError, match="not JSON data") as caught:
        ChatRenderer(tokenizer, CHATML).render(talk("x"), template_kwargs=settings)
    assert caught.value.param == param


@pytest.mark.parametrize("where", ["documents", "key", "spread"])
def test_the_bound_on_characters_is_on_all_of_them_together(tokenizer: Tokenizer, where: str) -> None:
    renderer = ChatRenderer(tokenizer, CHATML)
    text = "a" * 1_500_000
    messages = [{"role": "user", "content": text}, {"role": "user", "content": text}]
    assert renderer.render(messages).text.count("a") > 2_900_000
    settings: dict[str, Any] = {}
    if where == "documents":
        settings["documents"] = [{"text": text}]
    elif where == "key":
        messages[0][text] = "x"
    else:
        messages += [{"role": "user", "content": "b" * 10_000}] * 150
    with pytest.raises(RequestError, match="more than 4194304 characters"):
        renderer.render(messages, template_kwargs=settings)
