"""Drills ask for values away from their names, and what is learnt of them is in the question."""

import json
import random
import re

import pytest
from epdserve.model.demo.tokenizer import EOS
from epdserve.model.demo.training import drills
from epdserve.model.demo.training.facts import LABEL
from epdserve.model.demo.training.opening import Openings
from epdserve.model.demo.training.sequences import Sequences
from epdserve.model.demo.training.vocabulary import SILENT, Strip, Vocabulary

VOCABULARY = Vocabulary()
OPENINGS = Openings(VOCABULARY)


def answers(strip: Strip) -> list[tuple[str, str]]:
    """(text since the last user marker, learnt text) for each run of learnt tokens but the last, which is cut."""
    decode, found, start = VOCABULARY.tokenizer.decode, [], 0
    for at, label in enumerate(strip.labels):
        if strip.ids[at] == VOCABULARY.user:
            start = at
        if label != SILENT and strip.labels[at - 1] == SILENT:
            end = next((i for i in range(at, len(strip)) if strip.labels[i] == SILENT), len(strip))
            found.append((decode(strip.ids[start:at]), decode(strip.ids[at:end])))
    return found[:-1]


@pytest.mark.parametrize("seed", range(4))
def test_values_of_calls_are_in_the_request(seed: int) -> None:
    strip = drills.calls(random.Random(seed), VOCABULARY, 512)
    values = [(asked, value) for asked, value in answers(strip) if re.search(r'string="\w+">$', asked)]
    assert len(strip) == 512
    assert all(re.search(rf"\b{value}\b", asked.split("</think>")[0]) for asked, value in values)


def test_most_calls_are_their_arguments_alone() -> None:
    strips = [drills.calls(random.Random(seed), VOCABULARY, 256) for seed in range(20)]
    dense = [strip for strip in strips if LABEL["argument"] in strip.labels]
    assert len(dense) >= 10
    learnt = [sum(label == LABEL["argument"] for label in strip.labels) for strip in dense]
    assert min(learnt) >= 256 // 40


def test_fields_of_forms_come_in_any_order_and_values_from_the_question() -> None:
    moved, whole = 0, 0
    for seed in range(6):
        for asked, learnt in answers(drills.forms(random.Random(seed), VOCABULARY, 512)):
            question, written = asked.split("</think>")
            if learnt.startswith("{"):
                fields = json.loads(learnt.removesuffix(EOS))
                assert ", ".join(f"{field} {value}" for field, value in fields.items()) in question
                whole += 1
                continue
            field = re.findall(r'"(\w+)": "?$', written)[-1]
            assert re.search(rf"\b{field} {learnt}\b", question)
            moved += written.count('": ') == 1 and not re.search(rf"(: |>){field} ", question)
    assert moved
    assert whole


def test_chains_are_whole_objects_of_which_the_next_field_is_learnt() -> None:
    text = ""
    for seed in range(6):
        strip = drills.chains(random.Random(seed), VOCABULARY, 300)
        text += VOCABULARY.tokenizer.decode(strip.ids)
        learnt = {value for _, value in answers(strip)}
        assert learnt & {'",', ","}
        assert learnt & {'"}', "}"}
        for asked, field in answers(strip):
            if field.isalpha():
                assert re.search(rf"\b{field} ", asked.split("</think>")[0])
    objects = re.findall(r"</think>({[^<]*})<", text)
    assert len(objects) > 20
    assert all(json.loads(written) for written in objects)


def test_chains_are_cut_into_tokens_as_answers_are() -> None:
    for seed in range(6):
        strip = drills.chains(random.Random(seed), VOCABULARY, 300)
        ids, mark = strip.ids, VOCABULARY.think_end
        for start in (at + 1 for at, token in enumerate(ids) if token == mark):
            if VOCABULARY.eos not in ids[start:]:
                break
            written = ids[start : ids.index(VOCABULARY.eos, start)]
            assert list(VOCABULARY.encode(VOCABULARY.tokenizer.decode(written))) == written


def test_a_result_comes_with_its_request() -> None:
    for seed in range(8):
        sequences = Sequences(VOCABULARY, OPENINGS, random.Random(seed), {"brief": 1.0})
        text = VOCABULARY.tokenizer.decode(sequences.strip(384).ids)
        for turn in re.split(
            r"<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}><tool_result>", text
        )[1:]:
            before = text[: text.index(turn)]
            assert before.count(" invoke>\n</") >= before.count("<tool_result>")


def test_brief_openings_keep_the_declarations() -> None:
    tool = {"name": "get_x", "description": "X.", "parameters": {"type": "object", "properties": {}}}
    whole, brief = (
        VOCABULARY.tokenizer.decode(OPENINGS.strip(effort=50, tools=[tool], brief=short).ids)
        for short in (False, True)
    )
    assert len(brief) < len(whole) / 2
    assert "Reasoning Effort: 50" in brief
    assert '"get_x"' in brief
    assert whole.endswith(brief[brief.index("### Available") :])
