"""Output kept to grammars; tokens of the small vocabulary are bytes."""

import json
import threading
from collections.abc import Iterator

import llguidance
import pytest
from epdserve.services.decode.grammar import Constraints
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.grammar import formats
from epdserve.services.grammar.compiler import GrammarCompiler
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.sampling import Grammar, GrammarKind
from epdserve.services.types import FinishReason, SamplingParams
from support.grammars import EOS_ID, FIRST_BYTE, byte_text, byte_vocabulary
from support.manual_clock import ManualClock
from support.toy_decoding import ToyWorker, task

THINK_END, MARKUP = 2, 3
PAIR = formats.json_schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
)
DIGITS = formats.regex("[0-9]{3}")


@pytest.fixture
def toy() -> Iterator[ToyWorker]:
    toy = ToyWorker()
    yield toy
    toy.close()


def warm(seed: int, **changes: object) -> SamplingParams:
    values: dict[str, object] = {"seed": seed, "max_tokens": 3000, "temperature": 1.0}
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def after_thinking(grammar: Grammar) -> Grammar:
    return Grammar(grammar.kind, grammar.text, THINK_END, forbidden_before=(EOS_ID, MARKUP))


def is_pair(tokens: list[int]) -> bool:
    value = json.loads(byte_text(tokens))
    return value.keys() == {"a", "n"} and value["a"] in ("x", "yy") and 10 <= value["n"] <= 99


def test_output_is_of_the_grammar_and_ends_with_it(toy: ToyWorker) -> None:
    tasks = [task([20 + n], warm(n), grammar=PAIR) for n in range(5)]
    for each, output in zip(tasks, toy.run(tasks), strict=True):
        assert is_pair(output)
        assert toy.reasons[each] is FinishReason.STOP
        assert EOS_ID not in output
    assert toy.constraints.counts.compiled == 1


def test_neighbours_without_grammar_keep_their_draws(toy: ToyWorker) -> None:
    [alone] = toy.run([task([20], warm(1, max_tokens=30, ignore_eos=True))])
    mixed = toy.run([task([30], warm(2), grammar=PAIR), task([20], warm(1, max_tokens=30, ignore_eos=True))])
    assert mixed[1] == alone
    assert is_pair(mixed[0])


def test_an_open_end_is_ended_by_eos_or_by_length(toy: ToyWorker) -> None:
    many = formats.regex("[a-c]+")
    open_, cut = (
        task([20], warm(1, logit_bias=((EOS_ID, 3.0),)), grammar=many),
        task([20], warm(1, max_tokens=3, logit_bias=((EOS_ID, -90.0),)), grammar=many),
    )
    drawn, _ = toy.run([open_, cut])
    assert drawn[-1] == EOS_ID
    assert set(byte_text(drawn)) <= set("abc")
    assert (toy.reasons[open_], toy.reasons[cut]) == (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_is_free_and_what_follows_is_not(toy: ToyWorker, seed: int) -> None:
    [output] = toy.run([task([20], warm(seed), grammar=after_thinking(PAIR))])
    at = output.index(THINK_END)
    assert not {EOS_ID, MARKUP} & set(output[:at])
    assert is_pair(output[at + 1 :])


def test_a_free_output_is_that_of_a_request_without_grammar(toy: ToyWorker) -> None:
    free = warm(9, max_tokens=200, logit_bias=((THINK_END, -90.0), (EOS_ID, -90.0), (MARKUP, -90.0)))
    plain, waiting = toy.run([task([20], free), task([20], free, grammar=after_thinking(PAIR))])
    assert plain == waiting
    assert len(plain) == 200


@pytest.mark.parametrize("grammar", [PAIR, after_thinking(PAIR)], ids=["from the start", "after thinking"])
def test_a_request_taken_over_at_any_token_goes_on_the_same(toy: ToyWorker, grammar: Grammar) -> None:
    params = warm(7, logit_bias=((THINK_END, 6.0),), frequency_penalty=0.1)
    [whole] = toy.run([task([20, 21], params, grammar=grammar)])
    tasks = [task([20, 21], params, grammar=grammar, emitted=whole[:cut]) for cut in range(len(whole))]
    assert toy.run(tasks) == [whole[cut:] for cut in range(len(whole))]
    done = task([20, 21], params, grammar=grammar, emitted=whole)
    assert toy.run([done]) == [[]]
    assert toy.reasons[done] is FinishReason.STOP


def test_tokens_that_do_not_fit_the_grammar_are_told(toy: ToyWorker) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        toy.run([task([20], warm(1), grammar=DIGITS, emitted=[FIRST_BYTE + ord("x")])])


def test_a_continued_answer_has_been_read(toy: ToyWorker) -> None:
    begun = '{"a": "y'
    prompt = [20, *(FIRST_BYTE + byte for byte in begun.encode())]
    grammar = Grammar(PAIR.kind, PAIR.text, read_tokens=len(begun))
    [output] = toy.run([task(prompt, warm(1), grammar=grammar)])
    assert json.loads(begun + byte_text(output))["a"] == "yy"
    with pytest.raises(InvalidRequest):
        task([20], warm(1), grammar=grammar)


def test_other_wishes_give_way_to_the_grammar(toy: ToyWorker) -> None:
    digits = tuple((FIRST_BYTE + byte, float("-inf")) for byte in b"0123456789")
    wishes = [
        warm(1, logit_bias=digits),
        warm(2, min_tokens=50),
        warm(3, min_tokens=50, stop_token_ids=tuple(token for token, _ in digits)),
        warm(4, ignore_eos=True),
        warm(5, temperature=0.0, frequency_penalty=2.0),
    ]
    for output in toy.run([task([20], params, grammar=DIGITS) for params in wishes]):
        assert len(output) == 3
        assert byte_text(output).isdigit()


def test_a_grammar_that_grows_beyond_its_bounds_is_told(toy: ToyWorker) -> None:
    small = ToyWorker(GrammarCompiler(byte_vocabulary, GrammarLimits(lexer_states=40)))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        small.run([task([20], warm(1), grammar=formats.regex("(a|b)*a(a|b){40}c"))])
    small.close()


@pytest.mark.parametrize(
    "grammar",
    [formats.regex("(a"), formats.lark("start: a\na: a"), Grammar(GrammarKind.JSON_SCHEMA, "{")],
)
def test_a_grammar_that_will_not_do_is_told_with_its_field(toy: ToyWorker, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        toy.run([task([20], warm(1), grammar=grammar)])
    assert caught.value.param == "response_format"


class SlowVocabulary:
    """A vocabulary that is not there until it is let through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.woken = threading.Event()
        self.clock = ManualClock()
        self.constraints = Constraints(GrammarCompiler(self._load), clock=self.clock, wake=self.woken.set)

    def _load(self) -> llguidance.LLTokenizer:
        self.gate.wait(10)
        return byte_vocabulary()


def test_nobody_waits_for_ever_and_the_step_loop_is_woken() -> None:
    slow = SlowVocabulary()
    first, late = task([20], warm(1), grammar=DIGITS), task([20], warm(1), grammar=PAIR)
    slow.constraints.begin(first)
    assert slow.constraints.settle() == []
    assert first.waits_for_grammar
    slow.clock.advance(6.0)
    slow.constraints.begin(late)
    slow.clock.advance(6.0)
    [(ended, error)] = slow.constraints.settle()
    assert ended is first
    assert isinstance(error, InvalidRequest)
    slow.gate.set()
    assert slow.woken.wait(10)
    _settled(slow.constraints, late)
    assert not late.waits_for_grammar
    slow.constraints.close()


def test_a_task_that_has_ended_meanwhile_is_forgotten() -> None:
    slow = SlowVocabulary()
    gone = task([20], warm(1), grammar=DIGITS)
    slow.constraints.begin(gone)
    gone.phase = type(gone.phase).ENDED
    assert slow.constraints.settle() == []
    assert slow.constraints.compiling == 0
    slow.gate.set()
    slow.constraints.close()


def test_a_model_without_tokenizer_says_so() -> None:
    def load() -> llguidance.LLTokenizer:
        raise FileNotFoundError("tokenizer.json")

    toy = ToyWorker(GrammarCompiler(load))
    with pytest.raises(ServiceError, match="tokenizer"):
        toy.run([task([20], warm(1), grammar=DIGITS)])
    toy.close()


def _settled(constraints: Constraints, wanted: object) -> None:
    deadline = threading.Event()
    for _ in range(500):
        constraints.settle()
        if not constraints.compiling:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{wanted} still waits")
