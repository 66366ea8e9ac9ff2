"""Names classes."""

from __future__ import annotations


def class_name(name: str) -> str:
    """Returns the name of a class after a function or a path.

    Examples:
        >>> class_name("layer_norm"), class_name("_mlp"), class_name("ViT")
        ('LayerNorm', 'Mlp', 'ViT')
    """
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))
