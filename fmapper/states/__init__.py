"""Names the arrays of a tree, fills a tree from names, and shows what is where.

state        `state` and `load_state`
vector       `destructure`
materialize  values for a model without memory
matching     parts of two structures by name
plain        what models hold in plain attributes
inventory    what is at every place of a tree
summary      the inventory, printed
transient    arrays that checkpoints leave out
"""
