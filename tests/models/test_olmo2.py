"""OLMo 2 against transformers in float32, from Hugging Face folders and from GGUF files."""

from typing import Any

import gguf
import pytest

from octavo.checkpoints import read_model_facts
from octavo.errors import UnsupportedError
from tests.models.folders import changed_config
from tests.models.gguf_files import write_gguf
from tests.models.through_engine import VOCAB_SIZE, assert_engine_continues_as_transformers

BASE = {"family": "Olmo2", "num_hidden_layers": 3, "eos_token_id": 1, "pad_token_id": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one KV head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "base and epsilon": {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(make_model: Any, check_family: Any, variant: str) -> None:
    check_family(make_model(**BASE, **VARIANTS[variant]))


@pytest.mark.parametrize("wrong", [{"rms_norm_eps": 1.1e-2}, {"rope_parameters": {"rope_theta": 510000.0}}])
def test_control_a_slightly_wrong_config_fails(
    make_model: Any, paged_model: Any, expected_logits: Any, random_tokens: Any, wrong: dict[str, Any]
) -> None:
    folder = make_model(**BASE, **VARIANTS["base and epsilon"])
    tokens = random_tokens(100)
    expected = expected_logits(folder, tokens)
    got = paged_model(changed_config(folder, **wrong)).chunked(tokens, 100)
    assert (got - expected).abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_logits_of_its_source(make_model: Any, check_family: Any, tied: bool) -> None:
    folder = make_model(**BASE, tie_word_embeddings=tied, rms_norm_eps=1e-3)
    check_family(folder, gguf=write_gguf(folder, "olmo2"))


def test_control_permuted_rows_fail(make_model: Any, check_family: Any) -> None:
    folder = make_model(**BASE)
    with pytest.raises(AssertionError):
        check_family(folder, gguf=write_gguf(folder, "olmo2", permuted=True))


def test_olmo_3_which_llama_cpp_gives_the_same_name_is_refused(make_model: Any) -> None:
    def add_window(writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_sliding_window(4096)

    with pytest.raises(UnsupportedError, match="OLMo 3 is not supported"):
        read_model_facts(write_gguf(make_model(**BASE), "olmo2", extra=add_window))


@pytest.mark.parametrize("from_gguf", [False, True])
def test_the_engine_continues_as_transformers(make_model: Any, from_gguf: bool) -> None:
    folder = make_model(**BASE, vocab_size=VOCAB_SIZE)
    assert_engine_continues_as_transformers(folder, write_gguf(folder, "olmo2") if from_gguf else None)
