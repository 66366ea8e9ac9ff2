"""Statements that come again, compared by what they read and assign."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fmapper.translation.code import replace_nodes, statement_text, text
from fmapper.translation.merging.statements import Leaf, Line, key_of, leaves_of


class Mismatch(Exception):
    """Statements are not rounds of one loop."""


class Rounds:
    """Statements that come several times, one time after the other.

    Args:
        lines: The statements of a function.
        at: Where they begin.
        period: How many each time has.
        count: How often they come.

    Raises:
        Mismatch: A later time reads or gives something that a loop would not.
    """

    def __init__(self, lines: Sequence[Line], at: int, period: int, count: int) -> None:
        self._lines = lines
        self._end = at + period * count
        self._at = at
        self.period = period
        self.count = count
        self._rounds = [lines[at + k * period : at + (k + 1) * period] for k in range(count)]
        self._first = self._rounds[0]
        self._same: list[dict[int, int]] = []  # assignments of the first -> those of each
        self._common: set[int] = set()  # sizes that only the first reads, and all have
        self._own = [
            {leaf.version for line in one for leaf in line.stores()}
            | {version for line in one for version in line.versions.values()}
            for one in self._rounds
        ]
        self._align()
        earlier = [one for line in lines[:at] for one in (*line.leaves,) if one.is_store]
        self._known = {-1, *(one.version for one in earlier)}
        self._known |= {version for line in lines[:at] for version in line.versions.values()}
        self._renamed: dict[int, str] = {}  # assignments -> the variables that they get
        self._names_after: dict[int, ast.Name] = {}
        self._rewritten: dict[int, ast.stmt] = {}

    def _align(self) -> None:
        for line, *others in zip(*self._rounds, strict=True):
            self._align_sizes(line, others)
        for one in self._rounds:
            same: dict[int, int] = {version: version for version in self._common}
            for line, other in zip(self._first, one, strict=True):
                if isinstance(line.tree, ast.For) and line.pattern() != other.pattern():
                    raise Mismatch  # what one step of an inner loop gives to the next is another
                for a, b in zip(line.leaves, other.leaves, strict=True):
                    if a.is_store != b.is_store:
                        raise Mismatch
                    if a.is_store:
                        same[a.version] = b.version
                    elif a.version in self._own[0] and same.get(a.version) != b.version:
                        raise Mismatch
                places = {place: name for name, place in other.sizes.items()}
                for name, place in line.sizes.items():
                    if place in places:
                        same[line.versions[name]] = other.versions[places[place]]
            self._same.append(same)

    def _align_sizes(self, line: Line, others: Sequence[Line]) -> None:
        """Checks that later times read the sizes of the first, or have the same ones."""
        for name, (place, dim) in line.sizes.items():
            have = [(place, dim) in other.sizes.values() for other in others]
            if all(have):
                continue
            shapes = [
                one.shapes.get(one.stores()[place].name, ())[dim : dim + 1]
                for one in (line, *others)
            ]
            if any(have) or len({*shapes}) != 1 or not shapes[0]:
                raise Mismatch
            self._common.add(line.versions[name])
        for other in others:
            if not {*other.sizes.values()} <= {*line.sizes.values()}:
                raise Mismatch

    # --- what differs --------------------------------------------------------------------------

    def _columns(self) -> Iterator[tuple[Leaf, ...]]:
        for lines in zip(*self._rounds, strict=True):
            yield from zip(*(line.leaves for line in lines), strict=True)

    def numbers(self) -> Iterator[tuple[Leaf, tuple[Any, ...]]]:
        """Yields the numbers that differ, with those of each time."""
        for leaves in self._columns():
            if isinstance(leaves[0].node, ast.Constant):
                values = tuple(leaf.node.value for leaf in leaves)  # type: ignore[union-attr]
                if len({*map(repr, values)}) > 1:
                    yield leaves[0], values

    def _outer(self) -> Iterator[tuple[Leaf, ...]]:
        """Yields what is read from outside of the first time, with what is read by the others."""
        for leaves in self._columns():
            first = leaves[0]
            if first.name and not first.is_store and first.version not in self._own[0]:
                yield leaves

    def _version_before(self, leaves: Sequence[Leaf]) -> int | None:
        """Returns the assignment of the first time whose value the next one reads."""
        given = {
            next((mine for mine, theirs in same.items() if theirs == leaf.version), None)
            for same, leaf in zip(self._same, leaves[1:], strict=False)
        }
        return given.pop() if len(given) == 1 else None

    def _last_versions(self) -> dict[str, int]:
        """Maps the variables of the first time to the last assignments to them."""
        found: dict[str, int] = {}
        for line in self._first:
            found |= {leaf.name: leaf.version for leaf in line.stores()} | line.versions
        for version, name in self._renamed.items():
            found = {one: at for one, at in found.items() if at != version} | {name: version}
        return found

    def check_variables(self) -> dict[str, str]:
        """Checks what later times read; returns what a loop has to begin with, if by another name.

        Raises:
            Mismatch: They read something that a loop would not have.
        """
        begun: dict[str, str] = {}
        late: set[str] = set()  # of them, what is another value where later times read it
        last = self._last_versions()
        names = {version: name for name, version in last.items()}
        inside = set[int]().union(*self._own)
        for leaves in self._outer():
            name, versions = leaves[0].name, {leaf.version for leaf in leaves}
            if len({(leaf.version, leaf.name) for leaf in leaves}) == 1:
                continue
            if not versions & inside:
                if self._assigns_around(leaves[0], name):
                    raise Mismatch
                continue  # another variable each time
            carried = self._version_before(leaves)
            if carried is None or carried not in names:
                raise Mismatch
            target = names[carried]
            if begun.setdefault(target, name) != name:
                raise Mismatch
            if self._is_read_late(leaves[0], target):
                if target == name:
                    raise Mismatch
                late.add(target)
            if target != name and self._assigns_around(leaves[0], name, target):
                raise Mismatch
        outer = {leaf.name for leaf, *_ in self._outer()}
        for target, name in [*begun.items()]:
            if target != name and target in outer | late:
                self._keep_name(last[target], name)
                del begun[target]
        return {target: name for target, name in begun.items() if target != name}

    def _keep_name(self, version: int, name: str) -> None:
        """Lets what a time gives to the next have the name of what the first time is given.

        Raises:
            Mismatch: That variable is something else, too.
        """
        outer = [leaves for leaves in self._outer() if leaves[0].name == name]
        known = outer[0][0].version
        read_after = (leaf for line in self._lines[self._end :] for leaf in line.leaves)
        if any(self._version_before(one) != version for one in outer) or any(
            not leaf.is_store and leaf.name == name and leaf.version == known for leaf in read_after
        ):
            raise Mismatch
        is_made = False
        for line in self._first:
            for leaf in line.leaves:
                is_other = leaf.name == name and leaf.version != version
                if is_made and is_other:
                    raise Mismatch
                is_made |= leaf.is_store and leaf.version == version
            if name in line.versions or (is_made and isinstance(line.tree, ast.For)):
                raise Mismatch
        if any(self._is_read_late(leaves[0], name) for leaves in outer):
            raise Mismatch
        self._renamed[version] = name

    def renames(self) -> Iterator[tuple[Leaf, str]]:
        """Yields the variables of the first time that get other names."""
        for line in self._first:
            for leaf in line.leaves:
                if leaf.version in self._renamed:
                    yield leaf, self._renamed[leaf.version]

    def _is_read_late(self, leaf: Leaf, target: str) -> bool:
        """Returns whether a variable is assigned to before it is read."""
        for line in self._first:
            for one in line.leaves:
                if one is leaf:
                    return False
                if one.is_store and one.name == target:
                    return True
            if target in line.versions:
                return True
        return True

    def _assigns_around(self, leaf: Leaf, *names: str) -> bool:
        """Returns whether an inner loop that reads a variable assigns to one of some names."""
        return any(
            isinstance(line.tree, ast.For)
            and any(one is leaf for one in line.leaves)
            and any(one.name in names for one in line.stores())
            for line in self._first
        )

    def other_names(self) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
        """Yields what is another variable from outside each time."""
        inside = set[int]().union(*self._own)
        for leaves in self._outer():
            if not {leaf.version for leaf in leaves} & inside:
                names = tuple(leaf.name for leaf in leaves)
                if len({*names}) > 1:
                    yield leaves[0], names

    def reads_of_the_time_before(self) -> Iterator[tuple[Leaf, str]]:
        """Yields what the time before has given, with the variable that has it."""
        names = {version: name for name, version in self._last_versions().items()}
        inside = set[int]().union(*self._own)
        for leaves in self._outer():
            if {leaf.version for leaf in leaves} & inside:
                yield leaves[0], names[self._version_before(leaves) or 0]

    # --- what is read afterwards ---------------------------------------------------------------

    def gather(self, name_of: Callable[[Line | None, str], str]) -> dict[str, tuple[str, int]]:
        """Finds what the statements afterwards read of each time.

        Args:
            name_of: Names a list, after what makes an item, and the first variable in it.

        Returns:
            Lists -> the item that each time adds, and the assignment that it is.

        Raises:
            Mismatch: They read something else, of one time.
        """
        kept: dict[str, tuple[str, int]] = {}
        stored = self._last_versions()
        for line in self._lines[self._end :]:
            versions = {id(leaf.node): leaf for leaf in line.leaves}
            self._refuse_inner(line)
            gatherer = _Gatherer(self, versions, kept, name_of)
            tree = gatherer.visit(line.tree)
            for leaf in leaves_of(tree):
                known = versions.get(id(leaf.node))
                if known is None or known.is_store or not known.name:
                    continue
                if known.version in self._own[-1] - self._common:
                    self._rename(known, stored)
                elif any(known.version in own - self._common for own in self._own):
                    raise Mismatch
            self._rewritten[id(line)] = tree
        return kept

    def _refuse_inner(self, line: Line) -> None:
        """Raises where a loop afterwards reads a value and assigns to its variable, too."""
        names = {leaf.name for leaf in line.stores()} if isinstance(line.tree, ast.For) else set()
        inside = set[int]().union(*self._own)
        if any(leaf.name in names and leaf.version in inside for leaf in line.leaves):
            raise Mismatch

    def _rename(self, leaf: Leaf, stored: Mapping[str, int]) -> None:
        """Renames what is read of the last time to what the first one calls it."""
        mine = next(a for a, b in self._same[-1].items() if b == leaf.version)
        name = next((name for name, version in stored.items() if version == mine), None)
        if name is None:
            raise Mismatch
        if name != leaf.name:
            later = self._lines[self._end :]
            until = max(
                at for at, line in enumerate(later)
                if any(one.version == leaf.version and not one.is_store for one in line.leaves)
            )  # fmt: skip
            until += isinstance(later[until].tree, ast.For)  # whose next step reads it, too
            taken = {one.name for line in later[:until] for one in line.stores()}
            if name in taken.union(*(line.sizes for line in later[:until])):
                raise Mismatch
            assert isinstance(leaf.node, ast.Name)
            self._names_after[id(leaf.node)] = ast.Name(name, ast.Load())

    def item(
        self, nodes: Sequence[ast.expr], versions: Mapping[int, Leaf]
    ) -> tuple[str, int] | None:
        """Returns the code of an item where expressions are that of each time.

        Returns:
            The code, and of a variable the assignment; -1 for another expression.
        """
        if len({key_of(ast.Expr(node)) for node in nodes}) > 1:
            return None
        last = {*self._last_versions().values()}
        columns = zip(*([*leaves_of(node)] for node in nodes), strict=True)
        is_own, version = False, -1
        for leaves in columns:
            first, *others = leaves
            if not first.name:
                if any(repr(o.node.value) != repr(first.node.value) for o in others):
                    return None
                continue
            known = [versions.get(id(leaf.node)) for leaf in leaves]
            if any(one is None for one in known):
                return None
            read = [one.version for one in known if one is not None]
            if read[0] not in self._own[0] or read[0] in self._common:
                same = {(one.version, one.name) for one in known if one is not None}
                if len(same) > 1 or read[0] not in self._known | self._common:
                    return None
                continue
            if any(same.get(read[0]) != one for same, one in zip(self._same, read, strict=True)):
                return None
            if read[0] not in last and not self._is_plain(nodes[0], read[0]):
                return None
            is_own = True
            version = read[0]
        calls_parts = any(
            isinstance(node, ast.Call) and text(node.func).startswith("self.")
            for node in ast.walk(nodes[0])
        )
        if not is_own or calls_parts:
            return None
        if not isinstance(nodes[0], ast.Name):
            return None if self._renamed else (text(nodes[0]), -1)
        return self._renamed.get(version, nodes[0].id), version

    def _is_plain(self, node: ast.expr, version: int) -> bool:
        """Returns whether an item is a variable, which can be kept as soon as it is assigned."""
        made = self.maker(version)
        return isinstance(node, ast.Name) and made is not None and isinstance(made.tree, ast.Assign)

    def maker(self, version: int) -> Line | None:
        """Returns the statement of the first time that makes an assignment."""
        made = (line for line in self._first for one in line.stores() if one.version == version)
        return next(made, None)

    def is_only(self, item: tuple[str, int], line: Line) -> bool:
        """Returns whether a statement assigns an item that no other reads."""
        name, version = item
        if version < 0 or self.maker(version) is not line or not isinstance(line.tree, ast.Assign):
            return False
        (target, *_) = line.tree.targets
        read = [one for other in self._first for one in other.leaves if not one.is_store]
        is_read = any(one.version == version for one in read) or line.sizes
        carried = any(one == name for _, one in self.reads_of_the_time_before())
        return (
            isinstance(target, ast.Name) and not is_read and not carried and not self._is_read(name)
        )

    def _is_read(self, item: str) -> bool:
        """Returns whether the statements afterwards read an item of the last time, too."""
        leaves = (leaf for line in self._rewritten.values() for leaf in leaves_of(line))
        read = (self._names_after.get(id(leaf.node), leaf.node) for leaf in leaves if leaf.name)
        return any(isinstance(node, ast.Name) and node.id == item for node in read)

    # --- the parts of the function -------------------------------------------------------------

    def names(self) -> set[str]:
        """Returns all names of the function."""
        return {
            word for line in self._lines for code in (line.code, *line.after)
            for word in re.findall(r"(?<![.\w])[A-Za-z_]\w*", code)
        }  # fmt: skip

    def body(self) -> Iterator[Line]:
        """Yields the statements of the first time."""
        for line in self._first:
            yield line
            for code in line.read_sizes():
                (tree,) = ast.parse(code).body
                yield Line(code, tree, "", [])

    def before(self, begun: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """Returns the statements before, with those that give the first time its variables.

        Args:
            begun: The variables -> those that have their values, which are left out where nothing
                else reads them.
        """
        lines, given = [*self._lines[: self._at]], []
        names = [*begun.values()]
        for target, name in begun.items():
            is_one = names.count(name) == 1  # zeros may be both states of a cell
            place = self._place_of_given(target, name) if is_one else None
            if place is None:
                given.append(f"{target} = {name}")
            else:
                line = lines[place]
                lines[place] = replace(line, code=f"{target} = {line.code.partition(' = ')[2]}")
        return [code for line in lines for code in (line.code, *line.after)] + given

    def _place_of_given(self, target: str, name: str) -> int | None:
        """Returns the statement whose variable only the rounds read, and may have another name."""
        version = next(leaves[0].version for leaves in self._outer() if leaves[0].name == name)
        reads = [
            (at, leaf) for at, line in enumerate(self._lines) for leaf in line.leaves
            if leaf.version == version and not leaf.is_store
        ]  # fmt: skip
        made = [at for at, line in enumerate(self._lines[: self._at])
                if any(leaf.version == version for leaf in line.stores())]  # fmt: skip
        first = range(self._at, self._at + self.period)
        if not made or any(at not in first for at, _ in reads):
            return None
        line, later = self._lines[made[0]], self._lines[made[0] + 1 : self._at]
        is_free = not any(target in (leaf.name, *one.sizes) for one in later for leaf in one.leaves)
        is_plain = line.code.startswith(f"{name} = ") and not line.after
        return made[0] if is_free and is_plain else None

    def after(self) -> list[str]:
        """Returns the statements afterwards, as `gather` has rewritten them."""
        found = []
        for line in self._lines[self._end :]:
            tree = replace_nodes(self._rewritten[id(line)], self._names_after)
            code, plain = statement_text(tree), statement_text(ast.parse(line.code).body[0])
            found.append(line.code if code == plain else code)
            found += line.after
        return found


class _Gatherer(ast.NodeTransformer):
    """Replaces tuples and lists of what each time has given by a list."""

    def __init__(
        self,
        rounds: Rounds,
        versions: Mapping[int, Leaf],
        kept: dict[str, tuple[str, int]],
        name_of: Callable[[Line | None, str], str],
    ) -> None:
        self._rounds = rounds
        self._versions = versions
        self._kept = kept
        self._name_of = name_of
        self._to_iterate: set[int] = set()

    def visit_List(self, node: ast.List) -> ast.AST:
        return self._visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        return self._visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if text(node.func) in ("zip", "enumerate"):
            self._to_iterate |= {id(one) for one in node.args}
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self._to_iterate.add(id(node.iter))
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self._to_iterate.add(id(node.iter))
        return self.generic_visit(node)

    def _visit(self, node: ast.List | ast.Tuple) -> ast.AST:
        count = self._rounds.count
        for at in range(len(node.elts) - count + 1):
            if not isinstance(node.ctx, ast.Load):
                break
            nodes = node.elts[at : at + count]
            item, end = self._rounds.item(nodes, self._versions), ""
            if item is None:
                item, end = self._rounds.item(nodes[::-1], self._versions), "[::-1]"
            if item is None:
                continue
            name = next((name for name, one in self._kept.items() if one == item), "")
            if not name:
                words = re.findall(r"(?<![.\w])[A-Za-z_]\w*", item[0])
                name = self._name_of(self._rounds.maker(item[1]), words[0])
                self._kept[name] = item
            code = f"{name}{end}"
            if len(node.elts) == count:
                is_tuple = isinstance(node, ast.Tuple) and id(node) not in self._to_iterate
                return ast.parse(f"tuple({code})" if is_tuple else code, mode="eval").body
            node.elts[at : at + count] = [
                ast.Starred(ast.parse(code, mode="eval").body, ast.Load())
            ]
            break
        return self.generic_visit(node)
