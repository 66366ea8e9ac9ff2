"""Takes objects apart and puts them together; knows no array.

A class says once what its children are (`functor`), the look-up finds how any class is taken apart
(`nodes`), and one walk (`fmap`) maps trees with ties and cycles kept. All that fmapper does to a
model begins with a walk, so this room imports nothing of the others.

    keypath      where a child sits: `layers[0].weight`
    functor      `@functor`, `@leaf` and the registry behind them
    classes      what a class says of its attributes
    node_type    what a walk asks of a class
    containers   node types of lists, dicts, tuples and what derives from them
    objects      node types of declared classes
    nodes        the node type of any class, found once
    walk         going through a tree without rebuilding it
    children     one node at a time
    tree_map     the walk that rebuilds
    fmap         `fmap` and its relatives
    paths        get, has and set by key path
    no_gradient  what stands where nothing is trained
"""
