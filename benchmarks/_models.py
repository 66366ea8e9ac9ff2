"""The trees that are walked; classes come in a flavour: the library that knows them as nodes.

With optree and torch, classes are registered by getattr and setattr over the field names, as a
library does it; the flavour WRITTEN_OUT has the functions that an author writes for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

Tree = Any

NAMESPACE: Final = "fmapper-benchmarks"  # of optree's registry
WRITTEN_OUT: Final = "optree.tree_map, written out"
STATIC: Final = frozenset({"eps", "heads", "rate"})  # fields that are no children


# --- classes, the same for every library, each registered with one -------------------------------


def register(cls: type, children: Sequence[str], static: Sequence[str], flavour: str) -> None:
    """Make a class a node for one library, and for no other."""
    if flavour == "fmapper":
        functor = import_module("fmapper").functor
        functor(cls, children=tuple(children)) if static else functor(cls)
    elif flavour == "optree":
        flatten, unflatten = by_name(cls, children, static)
        import_module("optree").register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)
    elif flavour == WRITTEN_OUT:
        flatten, unflatten = written_out(cls, children, static)
        import_module("optree").register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)
    elif flavour == "jax":
        import_module("jax").tree_util.register_dataclass(cls, list(children), list(static))
    elif flavour == "torch":
        flatten, unflatten = by_name(cls, children, static)
        import_module("torch.utils._pytree").register_pytree_node(
            cls,
            flatten,
            lambda values, meta: unflatten(meta, values),
        )


def by_name(cls: type, children: Sequence[str], static: Sequence[str]) -> tuple[Any, Any]:
    """Return the flatten and unflatten that fit any class: by getattr and setattr."""

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (
            tuple([getattr(node, name) for name in children]),
            tuple([getattr(node, name) for name in static]),
        )

    def unflatten(meta: tuple[Any, ...], values: Sequence[Any]) -> Any:
        node: Any = object.__new__(cls)
        for name, value in zip(static, meta, strict=True):
            setattr(node, name, value)
        for name, value in zip(children, values, strict=True):
            setattr(node, name, value)
        return node

    return flatten, unflatten


def written_out(cls: type, children: Sequence[str], static: Sequence[str]) -> tuple[Any, Any]:
    """Return the flatten and unflatten that a careful author writes by hand for this one class."""

    def attributes(names: Sequence[str]) -> str:
        return "(" + "".join(f"node.{name}, " for name in names) + ")"

    def assign(names: Sequence[str], values: str) -> str:
        return f"    {attributes(names)} = {values}\n" if names else ""

    scope: dict[str, Any] = {"cls": cls, "new": object.__new__}
    exec(
        f"def flatten(node):\n    return {attributes(children)}, {attributes(static)}\n"
        "def unflatten(meta, values):\n    node = new(cls)\n"
        f"{assign(static, 'meta')}{assign(children, 'values')}    return node\n",
        scope,
    )
    return scope["flatten"], scope["unflatten"]


@cache
def link_class(flavour: str) -> type:
    """Return the class of a chain: a plain class, as most models are."""

    class Link:
        def __init__(self, w: Any, next: Any) -> None:
            self.w = w
            self.next = next

    register(Link, ("w", "next"), (), flavour)
    return Link


@cache
def gpt_classes(flavour: str) -> SimpleNamespace:
    """Return the dataclasses of GPT-2."""

    @dataclass
    class LayerNorm:
        weight: Any
        bias: Any
        eps: float = 1e-5

    @dataclass
    class Linear:
        weight: Any
        bias: Any = None

    @dataclass
    class Dropout:
        rate: float = 0.1

    @dataclass
    class Attention:
        c_attn: Linear
        c_proj: Linear
        attn_dropout: Dropout = field(default_factory=Dropout)
        resid_dropout: Dropout = field(default_factory=Dropout)
        heads: int = 12

    @dataclass
    class MLP:
        c_fc: Linear
        c_proj: Linear
        dropout: Dropout = field(default_factory=Dropout)

    @dataclass
    class Block:
        ln_1: LayerNorm
        attn: Attention
        ln_2: LayerNorm
        mlp: MLP

    @dataclass
    class GPT:
        wte: Any
        wpe: Any
        drop: Dropout
        blocks: list[Block]
        ln_f: LayerNorm
        head: Linear

    classes = (LayerNorm, Linear, Dropout, Attention, MLP, Block, GPT)
    for cls in classes:
        names = [f.name for f in fields(cls)]
        children = [name for name in names if name not in STATIC]
        register(cls, children, [name for name in names if name in STATIC], flavour)
    return SimpleNamespace(**{cls.__name__: cls for cls in classes})


@cache
def module_classes(flavour: str) -> SimpleNamespace:
    """Return the torch modules of the module case; optree can be told that modules are nodes."""
    nn = import_module("torch").nn

    class Stack(nn.Module):  # type: ignore[misc, name-defined]
        """A named row of modules."""

        def __init__(self, *modules: Any) -> None:
            super().__init__()
            for i, module in enumerate(modules):
                self.add_module(f"part{i}", module)

    class Dense(nn.Linear):  # type: ignore[misc, name-defined]
        """A Linear of our own, so that its registration touches nobody else's."""

    def flatten(module: Any) -> tuple[tuple[Any, ...], Any]:
        tables = (module._parameters, module._buffers, module._modules)
        return tuple([x for table in tables for x in table.values()]), module

    def unflatten(source: Any, values: Sequence[Any]) -> Any:
        rest = iter(values)
        module = object.__new__(type(source))
        module.__dict__.update(source.__dict__)
        for name, value in source.__dict__.items():
            if isinstance(value, (dict, set)):  # a hook on the new module is none on the old one
                module.__dict__[name] = value.copy()
        for name in ("_parameters", "_buffers", "_modules"):
            module.__dict__[name] = {key: next(rest) for key in source.__dict__[name]}
        return module

    if flavour == "optree":
        add = partial(import_module("optree").register_pytree_node, namespace=NAMESPACE)
        add(Stack, flatten, unflatten)
        add(Dense, flatten, unflatten)
    return SimpleNamespace(Stack=Stack, Dense=Dense)


# --- the trees -----------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    """Tell a leaf, for the walkers that have to ask."""
    return isinstance(x, np.ndarray)


def array() -> Any:
    """Return a leaf: a small array that is like no other object."""
    return np.zeros(4, np.float32)


def make_flat(flavour: str, size: int = 10_000) -> Tree:
    """Build the flat dict."""
    return {f"w{i}": array() for i in range(size)}


def tied_flat(flavour: str) -> Tree:
    """Build a small flat dict with a leaf and a node that occur twice."""
    w: Any = array()
    node = {"w": w}
    return {"a": w, "b": w, "c": node, "d": node}


def link_of(kind: str, flavour: str) -> Callable[[Any, Any], Tree]:
    """Return what builds one link of a chain of dicts, lists or objects."""
    if kind == "dict":
        return lambda w, rest: {"w": w, "next": rest}
    if kind == "list":
        return lambda w, rest: [w, rest]
    return link_class(flavour)


def make_chain(kind: str, flavour: str, depth: int = 300) -> Tree:
    """Build a chain: each level holds a leaf and the next level."""
    link = link_of(kind, flavour)
    chain = None
    for _ in range(depth):
        chain = link(array(), chain)
    return chain


def tied_chain(kind: str, flavour: str) -> Tree:
    """Build a small chain with a leaf and a node that occur twice."""
    link, w = link_of(kind, flavour), array()
    end = link(w, None)
    return link(end, link(w, end))


def make_gpt(flavour: str) -> Tree:
    """Build GPT-2 as dataclasses: 148 nodes, 148 arrays, the embedding tied to the head."""
    c = gpt_classes(flavour)

    def linear() -> Any:
        return c.Linear(array(), array())

    def norm() -> Any:
        return c.LayerNorm(array(), array())

    def block() -> Any:
        return c.Block(norm(), c.Attention(linear(), linear()), norm(), c.MLP(linear(), linear()))

    wte = array()
    blocks = [block() for _ in range(12)]
    return c.GPT(wte, array(), c.Dropout(), blocks, norm(), c.Linear(wte))


def tied_gpt(flavour: str) -> Tree:
    """Build GPT-2 with, beside its tied embedding, one block used twice."""
    model = make_gpt(flavour)
    model.blocks[1] = model.blocks[0]
    return model


def as_dicts(tree: Tree) -> Tree:
    """Turn the dataclasses of a tree, their children only, into dicts; keep its ties."""
    done: dict[int, Tree] = {}

    def convert(x: Tree) -> Tree:
        if id(x) not in done and is_dataclass(x):
            names = [f.name for f in fields(x) if f.name not in STATIC]
            done[id(x)] = {name: convert(getattr(x, name)) for name in names}
        elif id(x) not in done and isinstance(x, list):
            done[id(x)] = [convert(child) for child in x]
        return done.get(id(x), x)

    return convert(tree)


def make_module(flavour: str) -> Tree:
    """Build a torch module of 15 blocks with ten Linear each: 300 parameters."""
    c = module_classes(flavour)
    return c.Stack(*[c.Stack(*[c.Dense(2, 2) for _ in range(10)]) for _ in range(15)])


def tied_module(flavour: str) -> Tree:
    """Build a small module with a parameter and a submodule that occur twice."""
    c = module_classes(flavour)
    one, two, block = c.Dense(2, 2), c.Dense(2, 2), c.Stack(c.Dense(2, 2))
    two.weight = one.weight
    return c.Stack(one, two, block, block)
