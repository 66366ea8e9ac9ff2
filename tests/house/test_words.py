"""How the house speaks: docstrings that begin with a verb, functions named by verbs or nouns."""

import ast
import re

from support.sources import (  # noqa: F401
    ADAPTERS,
    CORE,
    ROOT,
    TRANSLATOR,
    name_of,
    nodes,
    parsed_sources,
)

FILES = [*CORE, *ADAPTERS, *TRANSLATOR]
PAGES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
]


def functions(path):
    return [
        node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def decorators(function):
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def is_property(function):
    """A value, described by a noun."""
    return any("property" in text or text.endswith("setter") for text in decorators(function))


def is_command(function):
    """The docstring of a command is its help, which speaks to the user."""
    return any(text.startswith("click.") for text in decorators(function))


NOT_VERBS = {  # though they end with an s
    *("This", "Thus", "Its", "Theirs", "Yours", "Plus", "Perhaps", "Always", "Besides", "Whereas"),
    *("As", "Is", "Was", "Backwards", "Forwards", "Arrays", "Rows", "Values", "Means"),
}


def test_a_docstring_of_a_function_begins_with_a_verb():
    wrong = []
    for file, function in ((path, function) for path in FILES for function in functions(path)):
        text = ast.get_docstring(function)
        if not text or is_property(function) or is_command(function):
            continue
        first = text.split()[0].rstrip(",;:.")
        if not re.fullmatch(r"[A-Z][a-z-]+s", first) or first in NOT_VERBS:
            wrong.append(f"{name_of(file)}: {function.name}: {text.splitlines()[0]}")
    assert wrong == []


def test_the_test_of_docstrings_can_fail():
    code = "def f():\n    '''The sum.'''\ndef g():\n    '''Returns the sum.'''"
    firsts = [ast.get_docstring(function).split()[0] for function in ast.parse(code).body]
    assert [bool(re.fullmatch(r"[A-Z][a-z-]+s", first)) for first in firsts] == [False, True]


def words(text):
    return frozenset(text.split())


IRREGULAR = words("""
    begun bound bred brought built caught chosen dealt done drawn driven fallen felt forbidden found
    frozen given gone grown heard held hidden kept known laid led lent lost made meant met rebound
    said seen sent shaken shot shown sold sought sped spent spoken stood taken taught thought thrown
    told torn undone understood unwound worn woven written
""")
NOT_PARTICIPLES = words("""
    bound bring embed embedding exceed feed lowering mapping need nothing padding pooling proceed
    recording seed sharding speed string thing
""")
LINKS = words("""
    after along alone anew as at away before below by for from here in inside of off on out over to
    up with
""")


def is_participle(word):
    if word in NOT_PARTICIPLES:
        return False
    return word in IRREGULAR or (len(word) > 4 and word.endswith(("ed", "ing")))


def is_named_by_a_participle(name):
    """`held`, `_turned_inside`, but not `named_arrays`, which is a noun."""
    first, *rest = name.strip("_").split("_")
    return is_participle(first) and (not rest or rest[0] in LINKS)


EXCEPTED = {
    "__missing__",  # what Python calls
    "searchsorted",  # an operation of torch and NumPy
    "having",  # `plan.having("moved")`: the word of SQL
}


def test_no_function_is_named_by_a_participle():
    names = {(name_of(p), f.name) for p in FILES for f in functions(p) if not is_property(f)}
    assert [
        (path, name)
        for path, name in sorted(names)
        if name not in EXCEPTED and is_named_by_a_participle(name)
    ] == []


NAMELESS = {"of", "call", "known", "given"}  # what is done, and to what, is left open


def test_a_function_of_a_module_says_what_it_does():
    functions = [(path, node) for path in FILES for node in nodes(path)[0].body]
    functions = [(path, node) for path, node in functions if isinstance(node, ast.FunctionDef)]
    assert [(name_of(path), node.name) for path, node in functions if node.name in NAMELESS] == []


def test_what_a_participle_is():
    bad = ["held", "_renamed", "_turned_inside", "looked_up", "waiting", "_given", "moved_by"]
    good = ["named_arrays", "embedding", "known_devices", "is_fitted", "check_borrowed", "hold"]
    assert all(map(is_named_by_a_participle, bad))
    assert not any(map(is_named_by_a_participle, good))


NO_SUCH = re.compile(r"(?<![Tt]here )\b(is|are|was|were|be) no (?!longer|more|one|such)[a-z`]")
THERE = re.compile(r"\b[Tt]here( \w+)? (is|are|was|were|be) no\b|\bwould be no\b")


def test_what_something_is_not_is_said_with_not():
    """`is not a model`, where `is no model` was."""
    lines = [(path, line) for path in (*FILES, *PAGES) for line in path.read_text().splitlines()]
    assert [
        (name_of(path), line.strip())
        for path, line in lines
        if NO_SUCH.search(line) and not THERE.search(line)
    ] == []


RELATIVE = re.compile(r"(What|Whose|Whom) (?!.*\?)")


def test_no_docstring_is_about_a_relative_clause():
    """`The contents of a tree.`, where `What there is in a tree.` was."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    described = [(path, node) for path in FILES for node in nodes(path) if isinstance(node, kinds)]
    texts = [(name_of(path), ast.get_docstring(node) or "") for path, node in described]
    wrong = [(path, text.splitlines()[0]) for path, text in texts if RELATIVE.match(text)]
    assert wrong == []
