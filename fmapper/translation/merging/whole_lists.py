"""Lists that a statement takes apart and the next one puts together again."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from fmapper.translation.code import identifier, replace_nodes, statement_text, text
from fmapper.translation.merging.statements import Leaf, Line, read_lines
from fmapper.translation.naming import singular

_GIVE_LISTS = ("array_split", "chunk", "split", "tensor_split", "unbind", "unstack")
_TAKE_LISTS = ("cat", "concat", "concatenate", "hstack", "stack", "vstack")


def with_whole_lists(lines: Sequence[str], tuples: Mapping[str, int]) -> list[str]:
    """Gives a function that takes a list the one that was taken apart, where that is all.

    Args:
        lines: The statements of a function.
        tuples: The parameters that are tuples -> how many items they have.

    Examples:
        >>> with_whole_lists(["a, b = jnp.split(x, 2)", "x = jnp.stack([a, b])", "a = f(x)"], {})
        ['x = jnp.stack(jnp.split(x, 2))', 'a = f(x)']
        >>> with_whole_lists(["return jnp.stack([given[0], given[1]])"], {"given": 2})
        ['return jnp.stack(given)']
    """
    assigned = {leaf.name for line in read_lines(lines, {}) for leaf in line.stores()}
    tuples = {name: count for name, count in tuples.items() if name not in assigned}
    read = read_lines([_with_tuples(line, tuples) for line in lines], {})
    leaves = [leaf for line in read for leaf in line.leaves]
    found: list[str] = []
    for line, after in zip(read, [*read[1:], None], strict=True):
        whole = _whole(line, after, leaves)
        if whole is None or after is None:
            found += [line.code, *line.after]
        else:
            old, new = whole
            after.tree = replace_nodes(after.tree, {id(old): new})
            after.code = statement_text(after.tree)
    return found


def _with_tuples(line: str, tuples: Mapping[str, int]) -> str:
    if "[0]]" not in line and not any(f"[{name}[" in line for name in tuples):
        return line
    (tree,) = ast.parse(line).body
    items = _Items(tuples)
    tree = items.visit(tree)
    return statement_text(tree) if items.changes else line


class _Items(ast.NodeTransformer):
    """Replaces a list of all items of a tuple by that, and the concatenation of one array by it."""

    def __init__(self, tuples: Mapping[str, int]) -> None:
        self._tuples = tuples
        self.changes = 0

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        first = node.args[0] if node.args else None
        name = text(node.func).rpartition(".")[2]
        if name not in _TAKE_LISTS or not isinstance(first, ast.List) or not first.elts:
            return node
        owner = text(first.elts[0]).partition("[")[0]
        count = len(first.elts)
        is_whole = [*map(text, first.elts)] == [f"{owner}[{i}]" for i in range(count)]
        if is_whole and self._tuples.get(owner) == count:
            self.changes += 1
            node.args[0] = ast.Name(owner, ast.Load())
        elif count == 1 and name == "concatenate" and not isinstance(first.elts[0], ast.Starred):
            self.changes += 1
            return first.elts[0]
        return node


def with_lists_of_parts(
    lines: Sequence[str], lengths: Mapping[str, int], titles: Mapping[str, Sequence[str]]
) -> list[str]:
    """Writes lists of what each part of a list gives as comprehensions.

    Args:
        lines: The statements of a function.
        lengths: Lists of parts, as `self.heads` -> how many parts they have.
        titles: The same -> what the classes of their parts are called.

    Examples:
        >>> line = "return stack([self.heads[0](x), self.heads[1](x)])"
        >>> with_lists_of_parts([line], {"self.heads": 2}, {})
        ['return stack([head(x) for head in self.heads])']
    """
    found = []
    for line in lines:
        parts, code = _Parts(line, lengths, titles), line
        if any(f"{name}[1]" in line for name in lengths):
            (tree,) = ast.parse(line).body
            code = statement_text(parts.visit(tree))
        found.append(code if parts.changes else line)
    return found


class _Parts(ast.NodeTransformer):
    def __init__(
        self, line: str, lengths: Mapping[str, int], titles: Mapping[str, Sequence[str]]
    ) -> None:
        self._words = {*re.findall(r"[A-Za-z_]\w*", line)}
        self._lengths = lengths
        self._titles = titles
        self.changes = 0

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        items = [*map(text, node.elts)]
        for owner, count in self._lengths.items():
            item = items[0] if items else ""
            if f"{owner}[0]" not in item or len(items) != count or count < 2:
                continue
            if items != [item.replace(f"{owner}[0]", f"{owner}[{i}]") for i in range(count)]:
                continue
            wanted = singular(owner.rpartition(".")[2], self._titles.get(owner, ("",))[0])
            variable = identifier(wanted, self._words)
            code = item.replace(f"{owner}[0]", variable)
            self.changes += 1
            return ast.parse(f"[{code} for {variable} in {owner}]", mode="eval").body
        return node


def _whole(
    line: Line, after: Line | None, leaves: Sequence[Leaf]
) -> tuple[ast.List, ast.expr] | None:
    """Returns the list in the next statement that has all that a statement assigns."""
    tree = line.tree
    if after is None or not isinstance(tree, ast.Assign) or line.sizes:
        return None
    gives = text(tree.value.func).rpartition(".")[2] if isinstance(tree.value, ast.Call) else ""
    if gives not in _GIVE_LISTS:  # another may give an array, whose rows those are
        return None
    (target, *more), stores = tree.targets, line.stores()
    if more or not isinstance(target, ast.Tuple) or len(stores) != len(target.elts):
        return None
    versions = [store.version for store in stores]
    readers = [leaf for leaf in leaves if leaf.version in versions and not leaf.is_store]
    if [leaf.version for leaf in readers] != versions:
        return None
    known: Mapping[int, Leaf] = {id(leaf.node): leaf for leaf in readers}
    for call in ast.walk(after.tree):
        if not isinstance(call, ast.Call) or not call.args or isinstance(after.tree, ast.For):
            continue
        first = call.args[0]
        name = text(call.func).rpartition(".")[2]
        if name in _TAKE_LISTS and isinstance(first, ast.List):
            items = [known.get(id(item)) for item in first.elts]
            if [item.version for item in items if item] == versions and all(items):
                return first, tree.value
    return None
