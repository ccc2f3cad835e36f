"""GBNF: what its texts are, and what is said about what is no GBNF."""

from __future__ import annotations

import pytest

from llmserve.grammar import GrammarKind
from llmserve.grammar.gbnf_lark import gbnf_to_lark
from tests.grammar_builders import accepts, refusal

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # no trailing comma
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CALCULATOR = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def is_text(grammar: str, text: str) -> bool:
    return accepts(GrammarKind.GBNF, grammar, text)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            JSON,
            ['{"a": [1, "x\\n\\u00fc", {}],\n\t"b":null}', "{}", '{"ü":-0.5e+3}'],
            ["{a}", "[]"],
        ),
        (CALCULATOR, ["a+(b*3)=c\n", "a = \n b \n\n1=2\n"], ["a=b", "a=(b\n"]),
        ('root ::= "ab"{2}', ["abab"], ["ab", "ababab"]),
        ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
        ('root ::= "a"{1,3}', ["a", "aaa"], ["", "aaaa"]),
        ('root ::= "a"{,2} "b"', ["b", "aab"], ["aaab"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab"]),
        ("root ::= [\\]a-c^-]+", ["]b^-c"], ["d", "\\"]),
        ("root ::= [^a\\n]", ["b", "ü", "\r"], ["a", "\n", "bb"]),
        ("root ::= . .", ["ü\n", "日x"], ["x"]),
        ('root ::= "\\x41\\u00fc\\U0001F600\\t\\\\\\""', ['Aü😀\t\\"'], ["A"]),
        ("root ::= 'it'", ["it"], ["i"]),
        ('root ::=\n  "a" # first\n  | # second\n  "b"\n', ["a", "b"], ["ab"]),
        ('root ::= a-b A_b\na-b ::= "x"\nA_b ::= "y"\n', ["xy"], ["yx"]),
        ('root ::= A a\nA ::= "x"\na ::= "y"', ["xy"], ["yx", "xx"]),
        ('root ::= "(" root? ")"', ["(())"], ["(()"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["ab"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "[日-月]" | [日-月]', ["[日-月]", "旦"], ["木"]),
    ],
)
def test_texts_of_a_grammar(grammar: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not is_text(grammar, text)] == []
    assert [text for text in others if is_text(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= ("a" "bc") | "ab"', "abc"),
        ('root ::= "(" root ")" | "a" "bc" | "ab"', "(abc)"),
        ("root ::= [a-z]+ [a-z]", "ab"),
        ('root ::= "(" root ")" | [a-z]+ [a-z]', "(ab)"),
        ('root ::= "<" root "=" | "<=" root | "x"', "<=<x="),
        ('root ::= [a-z]* "b" root | "1"', "abab1"),
        ('root ::= "if" root | [a-z]+ "(" root | "x1"', "ifx1"),
        ('root ::= "é" root | [è-ê]* "1" root | "2"', "ééê12"),
    ],
)
def test_text_that_could_be_cut_in_other_ways_is_accepted(grammar: str, text: str) -> None:
    assert is_text(grammar, text)


def test_strings_of_recursive_grammars_are_terminals() -> None:
    """Single characters would make masks slow."""
    lark = gbnf_to_lark(JSON)

    assert 'R_STRING: "\\"" (' in lark
    assert sum(line.startswith("T") for line in lark.splitlines()) < 12


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule named root"),
        ('a ::= "b"', "no rule named root"),
        ("root ::= x", "the rule root uses x"),
        ('root ::= "a', "expected a closing"),
        ('root ::= "a\nb"', "expected a closing"),
        ("root ::= (", "closing parenthesis"),
        ('root ::= "a")', "expected a rule"),
        ("root ::= [z-a]", "ends reversed"),
        ("root ::= []", "no characters"),
        ('root ::= "a"{3,2}', "bounds reversed"),
        ('root ::= "a"{}', "number of repetitions"),
        ('root := "a"', "expected a rule"),
        ('root ::= "\\xZZ"', "2 hexadecimal digits"),
        ('root ::= "\\uD800"', "no character"),
        ('root ::= "x"\n\n| <think>', "line 3 of the grammar has '<think>'"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "nested more than 64"),
        ("root ::= root", "no text matches"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str, message: str) -> None:
    assert message in refusal(GrammarKind.GBNF, grammar)


def test_grammar_that_takes_too_long_to_translate_is_refused() -> None:
    rules = "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(3000))

    message = refusal(GrammarKind.GBNF, f'root ::= r0\n{rules}\nr3000 ::= "c" root')

    assert message == "the grammar is too complex"


def test_long_chain_of_rules_is_refused() -> None:
    rules = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(3000))

    message = refusal(GrammarKind.GBNF, f'root ::= r0\n{rules}\nr3000 ::= "c"')

    # Which limit it meets first depends on the machine.
    assert message in (
        "the grammar is nested too deeply",
        "the grammar is too complex",
        "compiling the grammar takes more than 10 s; simplify it",
    )
