"""What every facet of an adapter says: whose it is."""

from abc import ABC
from typing import ClassVar


class Framework(ABC):
    """A framework that fmapper knows, under a name.

    What is known of it stands in up to four facets: `Arrays`, `Nodes`, `Compute` and `Models`. An
    adapter derives from those that its framework has; `Adapter` is all four.

    Attributes:
        name: The backend's name, as in `torch:cuda:0`.
        framework: The module whose import makes the adapter load; usually the name.
    """

    name: ClassVar[str]
    framework: ClassVar[str] = ""
    lacking: ClassVar[str] = "adapter"  # what an adapter lacks that has not this facet
