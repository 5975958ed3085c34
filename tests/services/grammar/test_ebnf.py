"""EBNF rewritten as Lark: what the library then takes, what is refused, and that size costs little."""

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.ebnf import MOST_BYTES, is_ebnf, lark_of
from epdserve.services.sampling import Grammar, GrammarKind
from support.grammars import byte_vocabulary, takes

JSON = r"""
root   ::= object   # a comment
object ::= "{" ws (pair ("," ws pair)*)? "}"
pair   ::= string ":" ws (string | number |
           object)
string ::= "\"" ([^"\\\n] | "\\" ["\\/nrt])* "\""
number ::= "-"? [0-9]{1,3} ("." [0-9]+)?
ws     ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["yesno", ""]),
        # Not greedy: the characters of the class may be what follows
        ('root ::= [a-z]* "b"', ["b", "abb"], ["a"]),
        ('root ::= a-rule{2} | ("x" |)\na-rule ::= [^\\x41-\\u005A]', ["ab", "x", ""], ["aB", "a"]),
        (r'root ::= [\]\-^] . "\U0001F600"', ["]/\N{GRINNING FACE}", "-\n\N{GRINNING FACE}"], ["a/x"]),
        ("root ::= r1 r2\nr2 ::= [b-]\nr1 ::= [-a]", ["a-", "-b"], ["b-"]),  # names that ours are like
        ("root ::= [/%[&~]+", ["/%[&~"], ["]"]),
        (JSON, ['{"a": {"b": "\\"c"}, "d": -12.5}', "{}"], ['{"a": 1234}', '{"a"}']),
    ],
)
def test_texts_in_a_grammar_and_others(text: str, inside: list[str], outside: list[str]) -> None:
    grammar = Grammar(GrammarKind.LARK, lark_of(text, param="ebnf"))
    assert [takes(byte_vocabulary(), grammar, one) for one in inside] == [True] * len(inside)
    assert not any(takes(byte_vocabulary(), grammar, one) for one in outside)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= x", "no rule 'x'"),
        ('"a"', "a rule begins"),
        ('root ::= "a', "at character 9"),
        ('root ::= ("a"', "not closed"),
        ('root ::= ("a"\nx ::= "b")', "not closed"),
        ('root ::= "a")', "no group is open"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"**', "nothing to repeat"),
        ('root ::= "a"{3,2}', "counts rise"),
        ('root ::= "a"{99999}', "counts rise"),
        ('root ::= "a"\nroot ::= "b"', "a second rule"),
        (r'root ::= "\q"', "an escape"),
        (r'root ::= "\uD800"', "no character"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        ("root ::= [z-a]", "falls"),
        ("root ::= []", "an empty class"),
        ("root ::= " + "(" * 65, "nested"),
        ("root ::= %import x", "at character 9"),
        ("root ::= " + '"a" ' * MOST_BYTES, "at most"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        lark_of(text, param="ebnf")
    assert caught.value.param == "ebnf"


def test_lark_is_told_apart() -> None:
    assert is_ebnf("root ::= x")
    assert not is_ebnf("start: x")
