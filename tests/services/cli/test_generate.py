import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from epdserve.model.demo.writer import write_demo_model
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.generate import Generator, read_bodies, run
from support.vision import encoded, picture


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="module")
def generator(model_dir: Path) -> Iterator[Generator]:
    generator = Generator(model_dir, threads=1)
    yield generator
    generator.close()


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}


def test_answers_together_are_those_alone(generator: Generator) -> None:
    bodies = [body(f"Number {n}", thinking={"type": "disabled"}) for n in range(3)]
    together = [answer.content for answer in generator.answer(bodies)]
    assert together == [generator.answer([each])[0].content for each in bodies]


def test_thinking_comes_first_and_every_token_has_a_time(generator: Generator) -> None:
    [answer] = generator.answer([body("Think about it")])
    assert answer.reasoning
    assert answer.content == ""
    assert answer.finish_reason == "length"
    assert len(answer.token_at_s) == 6
    assert answer.token_at_s == sorted(answer.token_at_s)


def test_a_second_round_hits_the_cache(generator: Generator) -> None:
    long = body("A long line of words. " * 40)
    [first], [second] = generator.answer([long]), generator.answer([long])
    assert first.cached_tokens == 0
    assert 0 < second.cached_tokens < second.prompt_tokens


def test_pictures_are_seen_without_a_server(generator: Generator) -> None:
    def shown(seed: int, nbytes: int | None = None) -> dict[str, Any]:
        data = base64.b64encode(encoded(picture(40, 30, seed=seed))[:nbytes]).decode()
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        return body("", messages=messages, thinking={"type": "disabled"})

    [cat], [dog], [again] = (generator.answer([shown(seed)]) for seed in (1, 2, 1))
    assert cat.prompt_tokens == dog.prompt_tokens > 184
    assert (cat.cached_tokens, dog.cached_tokens) == (0, 0)
    assert again.cached_tokens > 160
    with pytest.raises(CommandError, match="image"):
        generator.answer([shown(3, 1000)])


@pytest.mark.parametrize("fields", [{"temperature": 7}, {"messages": []}, {"messages": "x"}, {"n": 3}])
def test_a_body_that_the_api_refuses_is_refused(generator: Generator, fields: dict[str, Any]) -> None:
    with pytest.raises(CommandError):
        generator.answer([body("x", **fields)])


def test_one_file_is_exact_or_not(generator: Generator) -> None:
    with pytest.raises(CommandError, match="all exact or none"):
        generator.answer([body("x"), body("y", exact=True)])


def test_text_goes_to_standard_output_and_the_receipt_beside_it(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_dir, [body("Hello")], threads=1, rounds=1, as_json=False)
    shown = capsys.readouterr()
    assert shown.out
    assert "answer 6 tokens" in shown.err
    run(model_dir, [body("Hello")], threads=1, rounds=2, as_json=True)
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert rounds[0][0]["text"] == rounds[1][0]["text"]
    assert rounds[0][0]["text"].strip() in shown.out


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot use the model"):
        Generator(tmp_path, threads=1)


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", "[["])
def test_a_file_that_holds_no_requests_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "requests.json").write_text(content)
    with pytest.raises(CommandError, match=r"requests\.json"):
        read_bodies(tmp_path / "requests.json")
