"""What the load generator asks, and when: data sets and arrivals."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench.serve import ArrivalOptions, BenchPrompt, DatasetOptions, arrival_times, read_prompts
from octavo.errors import ConfigError
from octavo.tokenizers import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama_dir)


def read(tokenizer: Tokenizer | None = None, told: list[str] | None = None, **options: Any) -> list[BenchPrompt]:
    def load() -> Tokenizer:
        assert tokenizer is not None, "no tokenizer is needed"
        return tokenizer

    return read_prompts(DatasetOptions(**options), load, [].append if told is None else told.append)


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# ---- random ---------------------------------------------------------------------------------------------------------


def test_random_ids_are_exactly_as_many_as_asked_and_no_special_tokens(tokenizer: Tokenizer) -> None:
    prompts = read(tokenizer, num_prompts=50, random_input_len=40, random_output_len=7)
    for each in prompts:
        assert isinstance(each.prompt, list)
        assert (len(each.prompt), each.num_tokens, each.output_len) == (40, 40, 7)
        assert not tokenizer.special_token_ids & set(each.prompt)
        assert max(each.prompt) < tokenizer.vocab_size
    assert len({tuple(each.prompt) for each in prompts}) == 50


@pytest.mark.parametrize("length", [1, 2, 33, 128])
def test_random_text_is_exactly_so_many_tokens(tokenizer: Tokenizer, length: int) -> None:
    for each in read(tokenizer, num_prompts=20, random_input_len=length, as_text=True):
        assert isinstance(each.prompt, str)
        assert len(tokenizer.encode(each.prompt)) == each.num_tokens == length


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others(tokenizer: Tokenizer) -> None:
    for as_text in (False, True):
        first, again, other = (
            read(tokenizer, num_prompts=5, random_input_len=9, as_text=as_text, seed=seed) for seed in (3, 3, 4)
        )
        assert first == again != other


def test_lengths_lie_evenly_in_their_range(tokenizer: Tokenizer) -> None:
    prompts = read(
        tokenizer, num_prompts=3000, random_input_len=10, random_output_len=20, random_range_ratio=(0.5, 0.25)
    )
    inputs = np.bincount([each.num_tokens or 0 for each in prompts], minlength=16)
    outputs = np.bincount([each.output_len for each in prompts], minlength=26)
    assert set(np.flatnonzero(inputs)) == set(range(5, 16))
    assert set(np.flatnonzero(outputs)) == set(range(15, 26))
    assert inputs[5:16].min() > 3000 / 11 * 0.7
    assert outputs[15:26].min() > 3000 / 11 * 0.7


@pytest.mark.parametrize("as_text", [False, True])
def test_a_shared_beginning_comes_before_the_rest(tokenizer: Tokenizer, as_text: bool) -> None:
    options = {"num_prompts": 4, "random_input_len": 8, "random_prefix_len": 12, "as_text": as_text}
    prompts = read(tokenizer, **options)
    ids = [tokenizer.encode(each.prompt) if isinstance(each.prompt, str) else each.prompt for each in prompts]
    assert {len(each) for each in ids} == {20}
    assert len({tuple(each[:12]) for each in ids}) == 1
    assert len({tuple(each[12:]) for each in ids}) == 4


# ---- files ----------------------------------------------------------------------------------------------------------


def test_sharegpt_gives_first_turns_and_the_lengths_of_second_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    question, answer = "how are you? " * 3, "I am fine, thank you. " * 3
    talk = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}, {"from": "human", "value": "no"}]
    entries = [
        {"id": "a", "conversations": talk},
        {"id": "one turn", "conversations": talk[:1]},
        {"id": "too short", "conversations": [{"from": "human", "value": "a"}, talk[1]]},
        {"id": "too long", "conversations": [{"from": "human", "value": question * 500}, talk[1]]},
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(entries))
    options = {"name": "sharegpt", "path": path, "num_prompts": 1}
    num_tokens, output_len = len(tokenizer.encode(question)), len(tokenizer.encode(answer))
    assert read(tokenizer, **options) == [BenchPrompt(question, num_tokens, output_len)]
    assert read(tokenizer, **options, sharegpt_output_len=3) == [BenchPrompt(question, num_tokens, 3)]


def test_custom_prompts_need_no_tokenizer(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a", "output_tokens": 3}, {"prompt": [1, 2], "output_tokens": 4})
    options = {"name": "custom", "path": path, "num_prompts": 2, "shuffle": False}
    assert read(**options) == [BenchPrompt("a", None, 256), BenchPrompt([1, 2], 2, 256)]
    assert [each.output_len for each in read(**options, custom_output_len=-1)] == [3, 4]


def test_a_files_prompts_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", *({"prompt": str(number)} for number in range(50)))
    options = {"name": "custom", "path": path, "num_prompts": 50}
    in_order = [str(number) for number in range(50)]
    assert [each.prompt for each in read(**options, shuffle=False)] == in_order
    first, again, other = ([each.prompt for each in read(**options, seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(in_order) != first


def test_too_few_prompts_are_sent_again_and_that_is_said(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    told: list[str] = []
    options = {"name": "custom", "path": path, "num_prompts": 5}
    prompts = read(told=told, **options)
    assert len(prompts) == 5
    assert {each.prompt for each in prompts} == {"a", "b"}
    assert "has 2 prompts that can be used, not 5" in told[0]
    with pytest.raises(ConfigError, match="lower --num-prompts"):
        read(**options, oversample=False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt": 3}', "line 2: "),
        ("custom", "no JSON", "line 1: "),
        ("custom", '{"prompt": ""}', "line 1: the prompt is empty"),
        ("custom", "\n\n", "has 0 prompts"),
        ("sharegpt", '{"conversations": []}', "expected"),
        ("sharegpt", "[]", "has 0 prompts"),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tokenizer, name=name, path=tmp_path / "file")


def test_a_file_that_is_not_there_or_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(name="custom", path=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        read(name="custom")


def test_an_output_length_that_the_file_does_not_say_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigError, match="output_tokens"):
        read(name="custom", path=path, num_prompts=1, custom_output_len=-1)


# ---- arrivals -------------------------------------------------------------------------------------------------------


def gaps(count: int = 20_001, **options: Any) -> Any:
    return np.diff(arrival_times(count, ArrivalOptions(**options)))


@pytest.mark.parametrize("rate", [0.5, 40.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(rate: float, burstiness: float) -> None:
    """Mean 1/rate; variance and the share of gaps below the mean are those of the gamma distribution of that shape."""
    found = gaps(request_rate=rate, burstiness=burstiness)
    assert found.mean() == pytest.approx(1 / rate)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    draw = random.Random(1)
    others = [draw.gammavariate(burstiness, 1 / burstiness) for _ in range(20_000)]
    below = sum(each < 1 for each in others) / len(others)
    assert (found * rate < 1).mean() == pytest.approx(below, abs=0.02)
    if burstiness == 1:  # Poisson: what comes in a second does not depend on the second before
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03


def test_infinite_burstiness_is_even_and_an_infinite_rate_is_at_once() -> None:
    assert gaps(5, request_rate=4.0, burstiness=float("inf")).tolist() == [0.25] * 4
    assert arrival_times(3, ArrivalOptions()).tolist() == [0.0] * 3


def test_arrivals_are_those_of_their_seed() -> None:
    first, again, other = (arrival_times(9, ArrivalOptions(request_rate=1.0, seed=seed)).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] == 0


def test_a_run_takes_as_long_as_its_rate_says_whatever_was_drawn() -> None:
    for seed in range(5):
        times = arrival_times(11, ArrivalOptions(request_rate=2.0, burstiness=0.01, seed=seed))
        assert times[-1] == pytest.approx(5.0)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_the_rate_ramps_up(strategy: str, middle: float) -> None:
    ramp = {"ramp_up_strategy": strategy, "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 100.0}
    found = gaps(102, burstiness=float("inf"), **ramp)
    assert 1 / found[[0, 50, 100]] == pytest.approx([1.0, middle, 100.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ramp_up_strategy": "linear"}, "needs both"),
        ({"ramp_up_start_rps": 1.0}, "need a --ramp-up-strategy"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 1.0},
            "leave out --request-rate",
        ),
    ],
)
def test_half_a_ramp_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArrivalOptions(**options)


@pytest.mark.parametrize("count", [1, 2])
def test_one_request_comes_at_once(count: int) -> None:
    assert arrival_times(count, ArrivalOptions(request_rate=1.0)).tolist() == [0.0, 1.0][:count]
