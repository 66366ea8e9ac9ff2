"""Takes objects apart and puts them together; knows no array.

A class says once what its children are (`functor`), the look-up finds how any class is taken apart
(`nodes`), and one walk (`fmap`) maps trees with ties and cycles kept. All that fmapper does to a
model begins with a walk, so this room imports nothing of the others.

    keypath      where a child sits: `layers[0].weight`
    nodes        what a walk asks of a class, and the look-up of that, once for each class
    classes      what a class says of its attributes
    containers   node types of lists, dicts, tuples and what derives from them
    functor      `@functor`, `@leaf` and what was declared with them
    objects      node types of declared classes
    walk         going through a tree without rebuilding it
    children     one node at a time
    tree_map     the walk that rebuilds
    fmap         `fmap` and its relatives
    paths        get, has and set by key path
"""

from fmapper.tree import nodes
from fmapper.tree.containers import Builtins
from fmapper.tree.objects import Declarations

nodes.sources += [Declarations(), Builtins()]  # adapters come after them
