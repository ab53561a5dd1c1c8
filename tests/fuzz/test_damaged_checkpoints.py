"""A damaged checkpoint is refused in one line or loads correctly: no other exception, no death, no hang, no gigabytes.

``make fuzz`` tries a hundred thousand.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, EngineDeadError
from tests.fuzz import reference
from tests.fuzz.attempts import attempt
from tests.fuzz.campaign import run_campaign
from tests.fuzz.mutations import MUTATIONS, mutate
from tests.fuzz.subjects import Subject, write_subjects

MUTATIONS_IN_THE_SUITE = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subjects")


@pytest.fixture(scope="module")
def subjects(folder: Path) -> list[Subject]:
    return write_subjects(folder)


def test_damaged_checkpoints_are_refused_in_one_line_or_load(tmp_path: Path) -> None:
    report = run_campaign(tmp_path, range(MUTATIONS_IN_THE_SUITE))
    assert report.failures == []
    assert report.total() == MUTATIONS_IN_THE_SUITE
    # Neither was all the damage harmless nor all of it fatal.
    assert report.total("refused") > MUTATIONS_IN_THE_SUITE // 10
    assert report.total("loaded") > MUTATIONS_IN_THE_SUITE // 10
    assert {mutation for _, mutation, _ in report.counts} == set(MUTATIONS)


def test_control_undamaged_they_load_and_are_what_the_libraries_read(folder: Path, subjects: list[Subject]) -> None:
    for subject in subjects:
        assert attempt(folder / subject.name / subject.model, compare=True) == ("loaded", "")


def test_every_mutation_changes_the_file_and_a_seed_is_the_same_damage(folder: Path, subjects: list[Subject]) -> None:
    for subject in subjects:
        for file in subject.files:
            whole = (folder / subject.name / file).read_bytes()
            made = [mutate(whole, file, random.Random(seed)) for seed in range(60)]
            assert made == [mutate(whole, file, random.Random(seed)) for seed in range(60)]
            assert all(damaged != whole for _, damaged in made)


def raising(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (CheckpointError("is damaged"), "refused"),
        (CheckpointError("two\nlines"), "failed"),
        (CheckpointError(""), "failed"),
        (EngineDeadError("gone"), "failed"),
        (ValueError("is damaged"), "failed"),
        (MemoryError(), "failed"),
        (SystemExit(1), "failed"),
    ],
)
def test_control_what_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch, error: BaseException, outcome: str) -> None:
    monkeypatch.setattr(octavo, "LLM", raising(error), raising=False)
    assert attempt(Path("model"))[0] == outcome


def test_control_a_tensor_read_wrong_is_a_failure(
    folder: Path, subjects: list[Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.iterate_tensors

    def wrong(path: Path) -> Any:
        for tensor in right(path):
            yield _changed(tensor) if "embed" in tensor.name else tensor

    monkeypatch.setattr(reference, "iterate_tensors", wrong)
    for subject in subjects:
        assert reference.difference(folder / subject.name / subject.model) is not None


def _changed(tensor: Any) -> Any:
    data = tensor.data.copy()
    data[0] ^= 1
    return dataclasses.replace(tensor, source=data)


def test_control_a_child_that_dies_is_a_failure_and_the_rest_is_tried_all_the_same(tmp_path: Path) -> None:
    report = run_campaign(tmp_path, range(10), workers=2, module="tests.fuzz.dying")
    assert (report.total(), report.total("loaded")) == (10, 6)
    assert sorted(failure["seed"] for failure in report.failures) == [0, 3, 6, 9]
    assert all("ended with -9" in failure["detail"] for failure in report.failures)
    assert all("last words" in failure["detail"] for failure in report.failures)


def test_control_the_limit_of_memory_is_one(tmp_path: Path) -> None:
    report = run_campaign(tmp_path, range(1), module="tests.fuzz.hungry")
    assert report.counts == {("none", "none", "loaded"): 1}
    assert torch.empty(3 << 30, dtype=torch.uint8).numel() == 3 << 30  # this process may have as much
