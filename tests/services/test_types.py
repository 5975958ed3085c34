from __future__ import annotations

import numpy as np
import pytest
from epdserve.services.errors import STATUS, Internal, WorkerLost
from epdserve.services.types import (
    Effort,
    ErrorInfo,
    FinishReason,
    PrefillJob,
    SamplingParams,
    TokenChunk,
    token_ids,
)


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint16)]
)
def test_token_ids_takes_any_list_of_integers(values: object) -> None:
    ids = token_ids(values)  # type: ignore[arg-type]
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 3]
    assert not ids.flags.writeable


def test_token_ids_copies_what_somebody_could_change() -> None:
    mine = np.array([1, 2], np.int32)
    ids = token_ids(mine)
    mine[0] = 9
    assert ids.tolist() == [1, 2]


def test_token_ids_of_nothing_are_empty() -> None:
    assert token_ids(()).tolist() == []


@pytest.mark.parametrize("values", [[-1], [2**31], np.zeros((2, 2), np.int32), np.array([0.5])])
def test_token_ids_refuses_what_is_no_list_of_ids(values: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_ids(values)  # type: ignore[arg-type]


def test_jobs_are_compared_by_value() -> None:
    job = PrefillJob("a", token_ids([1, 2]), b"key")
    assert job == PrefillJob("a", token_ids([1, 2]), b"key")
    assert job != PrefillJob("a", token_ids([1, 3]), b"key")
    assert job != PrefillJob("b", token_ids([1, 2]), b"key")
    assert job != "a"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"seed": 2**63},
        {"stop_token_ids": (-1,)},
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(changes)))):
        SamplingParams(**({"seed": 0, "max_tokens": 1} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0, 101])
def test_effort_out_of_range_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match=str(level)):
        Effort(level)


def test_chunk_knows_its_end_and_whether_it_is_the_last() -> None:
    assert TokenChunk("a", 5, (1, 2)).end == 7
    assert not TokenChunk("a", 5, (1, 2)).final
    assert TokenChunk("a", 5, (), FinishReason.STOP).final
    assert TokenChunk("a", 5, (), error=ErrorInfo("internal", "x")).final


@pytest.mark.parametrize("code", STATUS)
def test_every_error_survives_being_a_value(code: str) -> None:
    error = STATUS[code].error("what happened", param="p", retry_after_s=1.5, worker="w", tokens_delivered=3)
    back = ErrorInfo.of(error).to_error()
    assert type(back) is type(error)
    assert ErrorInfo.of(back) == ErrorInfo.of(error)


def test_error_of_a_later_version_becomes_internal() -> None:
    error = ErrorInfo("never_heard_of", "x").to_error()
    assert type(error) is Internal
    assert str(error) == "x"


def test_error_value_keeps_zero_delivered_tokens() -> None:
    assert ErrorInfo.of(WorkerLost("x", tokens_delivered=0)).tokens_delivered == 0
