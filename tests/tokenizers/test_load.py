"""Specification of tokenizers from a Hugging Face folder: which files count for what, as in transformers."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, processors

from octavo.errors import CheckpointError
from octavo.tokenizers import load_tokenizer

Write = Callable[..., Path]


@pytest.fixture
def backend(byte_level_json: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level_json)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    return caplog


def test_tokenizer_json_is_enough(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(write_folder(backend))
    text = "Hello <|begin|> wörld <tool_call>🙂"
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.special_tokens == {"<|begin|>", "<|end|>", "<|中|>"}
    assert tokenizer.special_token_ids == {backend.token_to_id(token) for token in tokenizer.special_tokens}
    assert tokenizer.bos_token is tokenizer.eos_token is tokenizer.eos_token_id is tokenizer.chat_template is None


def test_a_prompt_is_never_cut_or_padded(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ids = load_tokenizer(write_folder(backend)).encode("one two three")
    backend.no_truncation()
    backend.no_padding()
    assert ids == backend.encode("one two three").ids


@pytest.mark.parametrize("name_of", [lambda token: token, lambda token: {"content": token, "lstrip": False}])
def test_named_tokens_come_from_either_file(
    write_folder: Write, backend: tokenizers.Tokenizer, name_of: Callable[[str], Any]
) -> None:
    config = {"eos_token": name_of("<|end|>"), "bos_token": None}
    older = {"eos_token": name_of("<|中|>"), "bos_token": name_of("<|begin|>")}
    tokenizer = load_tokenizer(write_folder(backend, config, special_tokens_map__json=older))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    assert tokenizer.eos_token_id == backend.token_to_id("<|end|>")


def test_a_named_token_is_special_even_if_it_was_an_ordinary_one(write_folder: Write) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<": 0, "s": 1, ">": 2, "<s>": 3, "a": 4}, []))
    tokenizer = load_tokenizer(write_folder(backend, {"bos_token": "<s>"}))
    assert tokenizer.encode("a<s>") == [4, 3]
    assert tokenizer.decode([4, 3]) == "a"
    # Control: without the name it is text.
    assert backend.encode("a<s>").ids == [4, 0, 1, 2]


def test_a_named_token_that_does_not_exist_is_left_out_and_said(
    write_folder: Write, backend: tokenizers.Tokenizer, log: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(write_folder(backend, {"pad_token": "[PAD]"}))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert any("'[PAD]' is not in the vocabulary" in warning for warning in _warnings(log))


def test_added_tokens_of_the_configuration_are_added(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    size = backend.get_vocab_size()
    config = {
        "added_tokens_decoder": {
            str(size + 1): {"content": "<b>", "special": False},
            str(size): {"content": "<a>", "special": True},
        }
    }
    tokenizer = load_tokenizer(write_folder(backend, config))
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<b>"
    assert tokenizer.vocab_size == size + 2


def test_added_tokens_that_contradict_the_vocabulary_are_refused(
    write_folder: Write, backend: tokenizers.Tokenizer
) -> None:
    config = {"added_tokens_decoder": {"7": {"content": "<a>", "special": True}}}
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*'<a>' the id 7, but"):
        load_tokenizer(write_folder(backend, config))


def test_added_tokens_that_the_library_gives_other_ids_are_said(
    write_folder: Write, backend: tokenizers.Tokenizer, log: pytest.LogCaptureFixture
) -> None:
    state = json.loads(backend.to_str())
    load_tokenizer(write_folder(json.dumps(state)))
    assert not _warnings(log)
    state["added_tokens"][0]["id"] += 1000
    load_tokenizer(write_folder(json.dumps(state)))
    assert any("1 added tokens have other ids" in warning for warning in _warnings(log))


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, ["<|中|>"], []),  # as tokenizer.json has it
        ({"add_bos_token": True}, ["<|begin|>"], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>"], ["<|end|>"]),
        ({"add_bos_token": None, "add_eos_token": True}, [], ["<|end|>"]),
    ],
)
def test_what_is_put_around_a_text(
    write_folder: Write, backend: tokenizers.Tokenizer, flags: dict[str, Any], before: list[str], after: list[str]
) -> None:
    ids = {token: backend.token_to_id(token) for token in ("<|begin|>", "<|end|>", "<|中|>")}
    backend.post_processor = processors.TemplateProcessing("<|中|> $A", special_tokens=[("<|中|>", ids["<|中|>"])])
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} | flags
    tokenizer = load_tokenizer(write_folder(backend, config))
    inner = tokenizer.encode("the dog", add_special_tokens=False)
    assert inner == backend.encode("the dog", add_special_tokens=False).ids
    assert tokenizer.encode("the dog") == [*(ids[t] for t in before), *inner, *(ids[t] for t in after)]


def test_the_same_as_transformers(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", additional_special_tokens=["<|extra|>"]
    )
    reference.chat_template = "{{ messages }}"
    folder = write_folder(backend)
    reference.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    text = "<|begin|>Hello <|extra|> 🙂<tool_call> é"
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_token_ids == set(reference.all_special_ids) | {backend.token_to_id("<|中|>")}
    assert tokenizer.chat_template == reference.chat_template


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, None),
        ("{{ a }}", "{{ a }}"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ d }}"}], "{{ d }}"),
        ([{"name": "tool_use", "template": "x"}], None),
    ],
)
def test_the_chat_template_of_the_configuration(
    write_folder: Write, backend: tokenizers.Tokenizer, stated: Any, expected: str | None
) -> None:
    assert load_tokenizer(write_folder(backend, {"chat_template": stated})).chat_template == expected


def test_a_chat_template_file_goes_first(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    folder = write_folder(backend, {"chat_template": "of the configuration"}, chat_template__jinja="of the file 🙂\n")
    assert load_tokenizer(folder).chat_template == "of the file 🙂\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 3}, "bos_token must be a token's text, found int"),
        ({"eos_token": {"content": None}}, "eos_token must be a token's text, found NoneType"),
        ({"chat_template": 1}, "chat_template must be text or a list of named texts, found int"),
        ({"chat_template": ["a"]}, "chat_template must be text or a list of named texts, found list"),
        ({"chat_template": [{"name": "default", "template": 2}]}, "chat_template must be text"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false, found 'yes'"),
        ({"add_bos_token": True}, "add_bos_token is true, but there is no bos_token in the vocabulary"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object of token ids"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder must be an object of token ids"),
        ({"added_tokens_decoder": {"1": "a"}}, "added_tokens_decoder must be an object of token ids"),
        ([], "expected a JSON object, found list"),
    ],
)
def test_a_malformed_configuration_is_refused_by_name(
    write_folder: Write, backend: tokenizers.Tokenizer, config: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: " + message):
        load_tokenizer(write_folder(backend, config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "malformed tokenizer"),
        ("{", "malformed tokenizer"),
        ('{"model": null}', "malformed tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "out of vocabulary"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "the largest is -1"),
        ('{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}', "the largest is 4294967295"),
        ('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}', "UNK"),
    ],
)
def test_a_malformed_tokenizer_json_is_refused_by_name(write_folder: Write, content: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*" + message) as caught:
        load_tokenizer(write_folder(content))
    assert len(str(caught.value).splitlines()) == 1


def test_ids_put_around_a_text_must_be_in_the_vocabulary(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing("<|中|> $A", special_tokens=[("<|中|>", 9999)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*token id 9999"):
        load_tokenizer(write_folder(backend))


def test_a_panic_of_the_library_is_a_checkpoint_error(
    write_folder: Write, backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's panics are no Exceptions in Python."""
    folder = write_folder(backend)

    class Panic(BaseException):
        pass

    class Library:
        @staticmethod
        def from_file(path: str) -> Any:
            raise Panic("index out of bounds\nat line 3")

    monkeypatch.setattr("octavo.tokenizers.load.tokenizers.Tokenizer", Library)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: malformed tokenizer: index out of bounds") as caught:
        load_tokenizer(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_and_unreadable_files_are_named(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    folder = write_folder(backend)
    (folder / "special_tokens_map.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: cannot be read as text"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer here: expected one of tokenizer\.json, tokenizer\.model"):
        load_tokenizer(folder)


def test_many_threads_may_use_one_tokenizer(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(write_folder(backend, {"bos_token": "<|begin|>", "add_bos_token": True}))
    texts = [f"thread {index} 🙂 <|end|> שלום " * (index % 7 + 1) for index in range(200)]
    alone = load_tokenizer(write_folder(backend, {"bos_token": "<|begin|>", "add_bos_token": True}))
    expected = [
        (
            alone.encode(text),
            alone.encode(text, False),
            alone.encode_rendered(text, []),
            alone.decode(alone.encode(text)),
        )
        for text in texts
    ]

    def use(text: str) -> Any:
        ids = tokenizer.encode(text)
        return ids, tokenizer.encode(text, False), tokenizer.encode_rendered(text, []), tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, texts)) == expected


def turns_beside(work: Callable[[], Any]) -> int:
    """How often this thread goes on while another one works."""
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        while not done.done():
            time.sleep(0.001)
            turns += 1
    done.result()
    return turns


def test_long_texts_let_other_threads_go_on(write_folder: Write, backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(write_folder(backend))
    ids = tokenizer.encode("a long text " * 50_000)
    alone = turns_beside(lambda: backend.decode(ids))  # the control: nobody else goes on
    assert turns_beside(lambda: tokenizer.decode(ids)) > 10 + alone
    assert turns_beside(lambda: tokenizer.encode("a long text " * 50_000)) > 10 + alone


def test_only_the_spans_that_a_template_wrote_are_special_tokens(
    write_folder: Write, backend: tokenizers.Tokenizer
) -> None:
    backend.add_special_tokens([AddedToken("the", special=True, normalized=False)])  # mergeable from its letters
    tokenizer = load_tokenizer(write_folder(backend))
    text = "<|begin|>user: <|end|> the dog<|end|>"
    spans = tokenizer.find_special(text)
    assert [text[start:stop] for start, stop in spans] == ["<|begin|>", "<|end|>", "the", "<|end|>"]
    assert tokenizer.encode_rendered(text, spans) == tokenizer.encode_rendered(text) == backend.encode(text).ids
    written = [spans[0], spans[-1]]
    ids = tokenizer.encode_rendered(text, written)
    special = tokenizer.special_token_ids
    assert [index for index in ids if index in special] == [backend.token_to_id(t) for t in ("<|begin|>", "<|end|>")]
    assert ids[0] == backend.token_to_id("<|begin|>")
    assert ids[-1] == backend.token_to_id("<|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
