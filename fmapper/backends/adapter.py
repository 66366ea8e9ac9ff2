"""The adapter of a framework that has everything: arrays, nodes, kernels and models."""

from fmapper.backends.compute import Compute
from fmapper.backends.models import Models
from fmapper.backends.nodes import Nodes


class Adapter(Compute, Nodes, Models):
    """All that fmapper knows of one framework, in four facets.

    A subclass answers the abstract methods of `Arrays`; everything else has a default. An adapter
    of a framework that has less derives from the facets that it has: one of arrays alone from
    `Arrays`, one of layers over another framework's arrays from `Nodes` and `Models`.
    """
