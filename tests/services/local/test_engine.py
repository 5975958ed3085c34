from collections.abc import Iterator

import numpy as np
import pytest
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.local.bench import decode_rate
from epdserve.services.local.config import LocalSettings
from epdserve.services.local.engine import LocalEngine
from epdserve.services.router.images.pictures import Picture, PromptImage
from epdserve.services.types import FinishReason, SamplingParams
from support.engine import greedy, greedy_reference, prompt, settings
from support.golden import TINY
from support.vision import Shown, encoded, greedy_with_images, picture, show, write_vision_model


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(TINY, LocalSettings(engine=settings())) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(engine: LocalEngine) -> Iterator[None]:
    yield
    assert engine.leaked_pages() == 0


def test_batch_of_prompts_gets_the_models_own_tokens(engine: LocalEngine) -> None:
    prompts = [prompt(length, length) for length in (2, 30, 71)]
    answers = engine.generate(prompts, greedy(6))
    assert [list(answer.tokens) for answer in answers] == [greedy_reference(p, 6) for p in prompts]
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
    assert [answer.receipt.pulled_tokens for answer in answers] == [2, 30, 71]


def test_each_prompt_may_have_its_own_sampling(engine: LocalEngine) -> None:
    both = [greedy(3), SamplingParams(seed=9, max_tokens=5, temperature=1.0, ignore_eos=True)]
    answers = engine.generate([prompt(12, 1), prompt(12, 2)], both)
    assert [len(answer.tokens) for answer in answers] == [3, 5]


def test_second_turn_hits_the_first(engine: LocalEngine) -> None:
    [first] = engine.generate([prompt(40, 3)], greedy(2))
    longer = np.concatenate([prompt(40, 3), prompt(20, 4)])
    [second] = engine.generate([longer], greedy(2))
    assert (first.prefill.cached_tokens, second.prefill.cached_tokens) == (0, 40)
    [exact] = engine.generate([longer], greedy(2), exact=True)
    assert exact.prefill.cached_tokens == 0


def test_tokens_are_told_as_they_come(engine: LocalEngine) -> None:
    seen: list[tuple[int, int]] = []
    answers = engine.generate(
        [prompt(5, 5), prompt(6, 6)],
        greedy(4),
        on_tokens=lambda index, tokens: seen.extend((index, t) for t in tokens),
    )
    for index, answer in enumerate(answers):
        assert tuple(token for i, token in seen if i == index) == answer.tokens


def test_a_long_prompt_is_computed_in_chunks_between_which_others_decode() -> None:
    """Both roles share a step loop: a chunk of rows, then a token of whoever decodes, and the bits are their own."""
    told: list[int] = []
    long, short = prompt(70, 8), prompt(4, 9)
    with LocalEngine(TINY, LocalSettings(engine=settings(chunk_tokens=8))) as engine:
        answers = engine.generate(
            [short, long], greedy(12), on_tokens=lambda index, tokens: told.append(index)
        )
    assert [list(answer.tokens) for answer in answers] == [greedy_reference(p, 12) for p in (short, long)]
    assert (
        told.index(1) >= 8
    )  # nine chunks of the long prompt ran, and the other got a token after most of them


def test_impossible_prompts_are_refused(engine: LocalEngine) -> None:
    for tokens in ([], [600], [5] * 5000):
        with pytest.raises(InvalidRequest):
            engine.generate([tokens], greedy(2))


def test_more_requests_than_fit_wait_their_turn(engine: LocalEngine) -> None:
    answers = engine.generate([prompt(60, 100 + n) for n in range(20)], greedy(2))
    assert all(len(answer.tokens) == 2 for answer in answers)


def test_bench_counts_a_full_batch(engine: LocalEngine) -> None:
    rate = decode_rate(engine, batch=3, prompt_tokens=10, new_tokens=5)
    assert rate.tokens_per_s > 0
    assert rate.seconds > 0


def test_closed_engine_ends_what_runs() -> None:
    engine = LocalEngine(TINY, LocalSettings(engine=settings()))
    answers: list[BaseException] = []

    def close_soon(index: int, tokens: tuple[int, ...]) -> None:
        if not answers:
            answers.append(RuntimeError())
            closer.start()

    import threading

    closer = threading.Thread(target=engine.close)
    with pytest.raises(ServiceError):
        engine.generate([prompt(9)], greedy(700), on_tokens=close_soon)
    closer.join(10)
    assert engine.leaked_pages() == 0


def test_images_are_embedded_in_the_same_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same answers as from pools and from one model, cold and with hits; a damaged image ends its prompt alone."""
    model = write_vision_model(tmp_path_factory.mktemp("model"))
    cat, strip = Shown.of(encoded(picture(50, 40, seed=1))), Shown.of(encoded(picture(90, 9, seed=3)))
    ids, placed = show(prompt(21, 1), cat, prompt(9, 2), strip, prompt(11, 3))
    images = [PromptImage(at, Picture(each.digest, each.tokens, each.data)) for at, each in placed]
    broken = PromptImage(0, Picture(b"b" * 32, cat.tokens, cat.data[:100]))
    with LocalEngine(model, LocalSettings(engine=settings(model_dir=model))) as engine:
        for turn in range(2):
            [answer] = engine.generate([ids], greedy(4), images=[images])
            hit = answer.prefill.cached_tokens
            assert list(answer.tokens) == greedy_with_images(ids, placed, 4, hit=hit)
            assert (hit > 0) == (turn > 0)
        for _ in range(8):
            with pytest.raises(InvalidRequest):
                engine.generate([show(cat)[0]], greedy(1), images=[[broken]])
            assert engine.leaked_pages() == 0


def test_a_model_of_text_refuses_images(engine: LocalEngine) -> None:
    picture_of = PromptImage(0, Picture(b"b" * 32, 5, b"x"))
    with pytest.raises(InvalidRequest, match="no images"):
        engine.generate([prompt(9, 1)], greedy(1), images=[[picture_of]])
