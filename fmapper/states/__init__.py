"""Names the arrays of a tree, fills a tree from named arrays, and summarises it.

state        `state` and `load_state`
vector       `destructure`
materialize  values for a model without memory
matching     pairs of parts of two structures
plain        state in plain attributes of models
inventory    the data of a summary
summary      the inventory, printed
transient    arrays that checkpoints leave out
"""
