"""Replaces sizes that depend on values by numbers, with padding."""

from fmapper_adapters.torch.passes.static_sizes.rewriter import PADDED as PADDED
from fmapper_adapters.torch.passes.static_sizes.rewriter import find_remaining as find_remaining
from fmapper_adapters.torch.passes.static_sizes.rewriter import fix_sizes as fix_sizes
