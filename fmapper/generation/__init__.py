"""Text generation: the programs of a model for a prompt and a step, and the choice of tokens.

decoding    decoding options as plain data, read from configurations
generation  the two programs of a model, and facts for a generator
generator   `generator`, and its result
prompts     prompts of unequal lengths as one array
file        generators as files
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.generation.decoding import Decoding, read_config
    from fmapper.generation.generation import Generation
    from fmapper.generation.generator import Generated, Generator
    from fmapper.generation.prompts import Prompts

__all__ = [
    "Decoding",
    "Generated",
    "Generation",
    "Generator",
    "Prompts",
    "read_config",
]

_PLACES = {
    "fmapper.generation.decoding": "Decoding read_config",
    "fmapper.generation.generation": "Generation",
    "fmapper.generation.generator": "Generated Generator",
    "fmapper.generation.prompts": "Prompts",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
