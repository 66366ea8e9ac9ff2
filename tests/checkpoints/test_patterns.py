"""Patterns for names, against regular expressions."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmapper import CheckpointError
from fmapper.tree.pattern import Pattern
from support.patience import no_hang

PIECES = {
    "{part}": r"(?P<part>[^.]+?)",
    "{many...}": r"(?P<many>.+?)",
    "{word:ab|a|b.a}": r"(?P<word>ab|a|b\.a)",
    "{word:a|ab}": r"(?P<word>a|ab)",
    "{number:1-11}": r"(?P<number>[1-9]|10|11)",
    "*": r".*?",
}


@st.composite
def patterns(draw):
    text, regex, used = "", "", set()
    for _ in range(draw(st.integers(0, 4))):
        plain = draw(st.text("ab.1", min_size=1, max_size=3))
        text, regex = text + plain, regex + re.escape(plain)
        piece = draw(st.sampled_from(list(PIECES)))
        kind = piece.partition(":")[0]
        if kind not in used or kind == "*":
            used.add(kind)
            text, regex = text + piece, regex + PIECES[piece]
    return text, re.compile(regex)


@pytest.mark.nightly
@settings(max_examples=2000, deadline=None)
@given(patterns(), st.text("ab.1", max_size=14))
def test_a_pattern_matches_what_the_regular_expression_does(pattern, name):
    text, regex = pattern
    found, wanted = Pattern(text).match(name), regex.fullmatch(name)
    assert (found is None) == (wanted is None)
    if found is not None and "*" not in text:
        assert Pattern(text).format(found) == name
        if "word" not in found and "number" not in found:  # of which the first counts there
            assert found == wanted.groupdict()


@given(st.text("ab.1{}[]*\\", max_size=8))
def test_a_literal_matches_itself_alone(name):
    assert Pattern(Pattern.escape(name)).match(name) == {}
    assert Pattern(Pattern.escape(name)).match(name + "a") is None


def test_a_capture_that_stands_twice_matches_the_same():
    assert Pattern("{i}.a.{i}").match("3.a.3") == {"i": "3"}
    assert Pattern("{i}.a.{i}").match("3.a.4") is None
    assert Pattern("{i:0-9}.w").match("03.w") is None


@pytest.mark.parametrize(
    ("text", "name", "captures"),
    [
        ("layers[3].{rest...}", "layers.3.a.b", {"rest": "a.b"}),
        ("layers[2:4].{x}", "layers.3.w", {"x": "w"}),
        ("layers[2:4].{x}", "layers.4.w", None),
        ("layers[2:]*", "layers.30.w", {}),
        ("layers[:3]*", "layers.30.w", None),
        ("[*].w", "a.b.w", {}),
        ("['a.b'].{x}", "a.b.c", {"x": "c"}),
    ],
)
def test_indices_and_slices(text, name, captures):
    assert Pattern(text).match(name) == captures


def test_indices_name_what_is_written():
    assert Pattern("layers[3].{x}").format({"x": "w"}) == "layers.3.w"


@given(patterns(), st.lists(st.text("ab1", max_size=3), min_size=1, max_size=5))
def test_key_by_key_matches_what_the_whole_name_does(pattern, keys):
    text, _ = pattern
    compiled = Pattern(text)
    positions = compiled.after(compiled.start, keys[0])
    for key in keys[1:]:
        positions = compiled.after(positions, f".{key}")
    name = ".".join(keys)
    if "b.a" not in name:  # a word across two keys, which only a whole name can have
        assert compiled.accepts(positions) == (compiled.match(name) is not None)
    ends = [*range(len(keys) + 1)]
    some = [keys[a:b] for a in ends for b in ends[a + 1 :]]
    assert compiled.occurs_in(name) == any(compiled.match(".".join(k)) is not None for k in some)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a{b", "has an unmatched '{'"),
        ("a}b", "has an unmatched '}'"),
        ("a\\", "unmatched"),
        ("{a b}", "is not a capture"),
        ("{}", "is not a capture"),
        ("{a:}", "is not a capture"),
        ("{a}{b}", "nothing between them"),
        ("*{a}", "nothing between them"),
        ("a" * 5000, "5000 characters"),
        ("{a}." * 40, "more than 64 parts"),
    ],
)
def test_what_is_no_pattern_is_said(text, message):
    with pytest.raises(CheckpointError, match=message):
        Pattern(text)


@pytest.mark.parametrize(
    "text", ["*a" * 31 + "b", "{a...}x" + "*a" * 30 + "b", "{a}a{b}a{c}a{d}a{e}a{f}ab", "{a:0-9}.b"]
)
def test_a_hostile_pattern_takes_no_time(text):
    with no_hang():
        assert Pattern(text).match("a" * 1000 + "c" * 20 + "b") is None
        assert Pattern(text).match("1" * 1000 + ".b") is None
