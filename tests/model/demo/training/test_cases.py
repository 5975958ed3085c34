"""Cases of the evaluation: their prompts hold what their answers say."""

import json
import re

import pytest
from epdserve.model.demo.training import efforts, newcomer
from epdserve.model.demo.training.cases import BLOCK, Cases
from epdserve.model.demo.training.vocabulary import Vocabulary

VOCABULARY = Vocabulary()
CASES = Cases(VOCABULARY)


def said(name: str, number: int) -> tuple[str, str]:
    case = CASES.draw(name, number)
    return CASES.text(case.prompt), CASES.text(case.answer[:-1])


@pytest.mark.parametrize("name", ["copy", "passage", "recall-200", "longer"])
def test_answers_stand_in_the_prompt(name: str) -> None:
    for number in range(5):
        prompt, answer = said(name, number)
        assert answer in prompt


def test_the_answer_to_a_result_tells_it() -> None:
    for number in range(8):
        prompt, answer = said("result", number)
        result = re.findall("<tool_result>(.*)</tool_result>", prompt)[-1]
        assert result in answer or result in ("done", "ok")
        assert " invoke>" in prompt  # the call that it belongs to


@pytest.mark.parametrize("tokens", [200, 1000, 4000])
def test_a_long_text_has_the_length_that_its_name_says(tokens: int) -> None:
    for number in range(3):
        assert len(CASES.draw(f"recall-{tokens}", number).prompt) == pytest.approx(tokens, rel=0.12)


def test_a_cut_ends_one_block_after_the_asked_value_begins() -> None:
    for number in range(3):
        case = CASES.draw("cut-256", number)
        assert case.cut % BLOCK == 0
        value = CASES.text(case.answer).split(" is ")[1].split(".")[0]
        assert CASES.text(case.prompt[case.cut - BLOCK : case.cut]).strip().startswith(value)


def test_a_snip_is_a_cut_that_is_answered_by_the_value_alone() -> None:
    case = CASES.draw("snip-256", 0)
    value = CASES.text(case.answer[:-1])
    assert len(case.answer) == 2
    assert CASES.text(case.prompt[case.cut - BLOCK : case.cut]).strip().startswith(value)


def test_questions_about_effort_hold_their_answers() -> None:
    for number in range(5):
        asked, answer = efforts.question(number)
        assert answer in asked
        assert asked == efforts.question(number)[0]


def test_ten_sentences_are_typed() -> None:
    assert len(newcomer.TEN) == 10
    assert len({sentence.text for sentence in newcomer.TEN}) == 10
    form = next(sentence for sentence in newcomer.TEN if "response_format" in sentence.fields)
    assert set(json.loads(form.answer)) == {"name", "city"}
