"""Fuses primitives into operations that torch has as a whole, in programs of JAX.

A program is rewritten before it is emitted: calls of `torch::softmax` and others replace the
primitives that compute them, and unused calls are dropped. Each file fuses one kind of operation.
Results and gradients are those of the primitives up to rounding.
"""

from fmapper_adapters.torch.fuse.recurrent import Gate as Gate
from fmapper_adapters.torch.fuse.recurrent import Gru as Gru
from fmapper_adapters.torch.fuse.recurrent import Lstm as Lstm
from fmapper_adapters.torch.fuse.recurrent import Part as Part
from fmapper_adapters.torch.fuse.recurrent import find_gru as find_gru
from fmapper_adapters.torch.fuse.recurrent import find_lstm as find_lstm
from fmapper_adapters.torch.fuse.rewrite import simplify as simplify
