"""Flattens and rebuilds objects; does not know about arrays.

A class declares its children once (`functor`), a lookup finds out how to flatten any class
(`nodes`), and one walk (`fmap`) maps trees and keeps ties and cycles. Everything that fmapper does
to a model begins with a walk, so this room does not import the others.

    keypath      the place of a child in a tree: `layers[0].weight`
    nodes        node types, and their lookup, once per class
    classes      attributes of classes
    containers   node types of lists, dicts, tuples and their subclasses
    functor      `@functor`, `@leaf` and their registry
    objects      node types of declared classes
    walk         iterating over a tree without rebuilding it
    children     one node at a time
    tree_map     the walk that rebuilds
    fmap         `fmap` and its relatives
    paths        get, has and set by key path
"""

from fmapper.tree import nodes
from fmapper.tree.containers import Builtins
from fmapper.tree.objects import Declarations

nodes.sources += [Declarations(), Builtins()]  # before the adapters
