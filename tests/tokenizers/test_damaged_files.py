"""Specification: a damaged tokenizer file is refused in one line that names it, or it makes a tokenizer that works.

The files are damaged at random: values of the JSON, bytes of the text, entries of GGUF's metadata.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.errors import CheckpointError, UnsupportedError
from octavo.tokenizers import IncrementalDetokenizer, Tokenizer, load_tokenizer

_QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
_TEXT = "Hello <|begin|> wörld 🙂\n123  <tool_call> \U0010fffd"
_CONFIG = {
    "bos_token": "<|begin|>",
    "eos_token": {"content": "<|end|>", "special": True},
    "add_bos_token": True,
    "add_eos_token": False,
    "added_tokens_decoder": {"259": {"content": "<|begin|>", "special": True, "lstrip": False}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}
_PARTS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "NFC"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": "(a|b)+"}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": False}]},
    ],
    "pre_tokenizer": [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Split", "pattern": {"Regex": "\\p{N}"}, "behavior": "Isolated", "invert": False},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}]},
    ],
    "post_processor": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [259], "tokens": ["<|begin|>"]}},
        },
    ],
    "decoder": [
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
    ],
    "model": [
        {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["a", -1.0], ["<0x41>", -2.5]],
            "byte_fallback": True,
        },
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
            "vocab": {"[UNK]": 0, "a": 1},
        },
        {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "a": 1}},
    ],
}
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63, -(2**40), 10**30, 0.5, -1e308]),
    st.sampled_from(
        ["", "a", "<|begin|>", "Ġ", "\x00", "(", "[^", "$A", "x:y", "BPE", "Unigram", "Fuse", "a b", "é" * 300]
    ),
)
_VALUES = st.one_of(
    _SCALARS, st.lists(_SCALARS, max_size=3), st.dictionaries(st.sampled_from(["a", "type", "0"]), _SCALARS)
)


def _small_json() -> dict[str, Any]:
    """A byte-level vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)} | {"he": 256, "ll": 257, "hell": 258}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [("<|begin|>", True), ("<|end|>", True), ("<tool_call>", False)]
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {"id": 259 + index, "content": content, "special": special, **flags}
            for index, (content, special) in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"]],
        },
    }


_SMALL = _small_json()


def damage(data: st.DataObject, root: Any) -> Any:
    """A copy with a value, or an entry of an object or a list, changed, taken out or put in twice."""
    node = root = copy.deepcopy(root)
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return root
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.integers(0, 2)) == 0:
            break
        node = node[key]
    how = data.draw(st.sampled_from(["replace", "replace", "delete", "repeat"]))
    if how == "replace":
        node[key] = data.draw(_VALUES)
    elif how == "delete":
        del node[key]
    elif isinstance(node, list):
        node.append(node[key])
    else:
        node[data.draw(st.sampled_from(["a", "type", "<|end|>", "9"]))] = node[key]
    return root


def check_use(tokenizer: Tokenizer) -> None:
    """It encodes, decodes and streams."""
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(_TEXT, add_special_tokens)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    ids = [*ids, *range(min(tokenizer.vocab_size, 600) + 2), *ids]
    for skip_special_tokens in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens)
    for token_id in ids:
        tokenizer.decode_token(token_id)
    tokenizer.encode_rendered(_TEXT)
    assert tokenizer.bos_token is None or isinstance(tokenizer.bos_token, str)
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.chat_template is None or isinstance(tokenizer.chat_template, str)


def check(path: Path, names: tuple[str, ...]) -> bool:
    """Loads and uses it; whether it was refused, as it should be."""
    try:
        tokenizer = load_tokenizer(path)
    except (CheckpointError, UnsupportedError) as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert len(message) < 1000
        assert any(message.startswith(str(path / name if name else path)) for name in names), message
        return True
    check_use(tokenizer)
    return False


def check_folder(tokenizer_json: str | bytes, config: str | bytes) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in (("tokenizer.json", tokenizer_json), ("tokenizer_config.json", config)):
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return check(folder, ("tokenizer.json", "tokenizer_config.json"))


@_QUICK
@given(data=st.data())
def test_damaged_tokenizer_json(data: st.DataObject) -> None:
    state = copy.deepcopy(_SMALL)
    for part in data.draw(st.sets(st.sampled_from(list(_PARTS)))):
        state[part] = data.draw(st.sampled_from(_PARTS[part]))
    for _ in range(data.draw(st.integers(0, 2))):
        state = damage(data, state)
    check_folder(json.dumps(state), "{}")


@_QUICK
@given(data=st.data())
def test_damaged_tokenizer_config(data: st.DataObject) -> None:
    check_folder(json.dumps(_SMALL), json.dumps(damage(data, damage(data, _CONFIG))))


@_QUICK
@given(data=st.data(), of_config=st.booleans())
def test_damaged_text(data: st.DataObject, of_config: bool) -> None:
    files = [json.dumps(_SMALL).encode(), json.dumps(_CONFIG).encode()]
    content = bytearray(files[of_config])
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.sampled_from([start, start + 1, start + 20, len(content)]))
    content[start:end] = data.draw(st.binary(max_size=4))
    files[of_config] = bytes(content)
    check_folder(files[0], files[1])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
@_QUICK
@given(data=st.data())
def test_damaged_gguf_metadata(
    request: pytest.FixtureRequest,
    write_gguf: Callable[[Path, dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    data: st.DataObject,
) -> None:
    metadata = dict(request.getfixturevalue(f"{kind}_metadata"))
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(metadata)))
        if isinstance(metadata[key], list) and data.draw(st.booleans()):
            metadata[key] = damage(data, metadata[key])
        elif data.draw(st.booleans()):
            metadata[key] = data.draw(_VALUES)
        else:
            del metadata[key]
            break
    # Not all of this can be written to a file.
    monkeypatch.setattr("octavo.tokenizers.load.read_gguf_metadata", lambda path: metadata)
    check(Path("model.gguf"), ("",))


def test_control_the_files_are_good_before_they_are_damaged(
    gpt2_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not check_folder(json.dumps(_SMALL), "{}")
    for part, variants in _PARTS.items():
        for variant in variants:
            assert not check_folder(json.dumps(_SMALL | {part: variant}), "{}"), (part, variant)
    monkeypatch.setattr("octavo.tokenizers.load.read_gguf_metadata", lambda path: gpt2_metadata)
    assert not check(Path("model.gguf"), ("",))


def test_control_damage_is_noticed() -> None:
    assert check_folder(json.dumps(_SMALL)[:-1], "{}")
    assert check_folder(json.dumps(_SMALL), "[]")
    assert check_folder(json.dumps(_SMALL | {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}), "{}")
