"""Takes objects apart and puts them together; knows no array.

A class says once what its children are (`functor`), the look-up finds how any class is taken apart
(`nodes`), and one walk (`fmap`) maps trees with ties and cycles kept. All that fmapper does to a
model begins with a walk, so this room imports nothing of the others.

    keypath      where a child sits: `layers[0].weight`
    functor      `@functor`, `@leaf` and the registry behind them
    nodes        one node type per class, found once
    walk         going through a tree without rebuilding it
    children     one node at a time
    fmap         the walk that rebuilds
    paths        get, has and set by key path
    no_gradient  what stands where nothing is trained
"""
