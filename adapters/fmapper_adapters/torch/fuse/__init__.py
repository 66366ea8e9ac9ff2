"""Recognises what JAX spells out and torch has whole, in programs of JAX's primitives.

A program is rewritten before it is emitted: calls of `torch::softmax` and the like take the place
of what computes them, and what nobody uses any more is left out. Each file knows one kind of thing.
The results are those of the primitives up to rounding, and so are the gradients.
"""

from fmapper_adapters.torch.fuse.gru import Gru as Gru
from fmapper_adapters.torch.fuse.gru import find_gru as find_gru
from fmapper_adapters.torch.fuse.recurrent import Gate as Gate
from fmapper_adapters.torch.fuse.recurrent import Lstm as Lstm
from fmapper_adapters.torch.fuse.recurrent import Part as Part
from fmapper_adapters.torch.fuse.recurrent import find_lstm as find_lstm
from fmapper_adapters.torch.fuse.rewrite import simplify as simplify
