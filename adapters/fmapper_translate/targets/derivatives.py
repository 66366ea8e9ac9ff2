"""Operations with a derivative of their own, as `torch.autograd.Function`.

A file takes the source of those that it names.
"""

from __future__ import annotations

import jax


@jax.tree_util.register_pytree_node_class
class Context:
    """Arrays and settings that `forward` keeps for `backward`."""

    def __init__(self, **kept):
        vars(self).update(kept)

    def save_for_backward(self, *arrays):
        """Keeps arrays."""
        self.saved_tensors = arrays

    def tree_flatten(self):
        """Returns the attributes with arrays, and the others."""
        is_array = {
            name: any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
            for name, value in vars(self).items()
        }
        arrays = {name: value for name, value in vars(self).items() if is_array[name]}
        rest = [(name, value) for name, value in vars(self).items() if not is_array[name]]
        return (arrays,), tuple(rest)

    @classmethod
    def tree_unflatten(cls, rest, arrays):
        """Returns a context with these attributes."""
        return cls(**dict(rest), **arrays[0])


class Function:
    """An operation that its classes compute in `forward`, with the gradients of `backward`."""

    @classmethod
    def apply(cls, *args):
        """Returns what `forward` does."""
        places = [at for at, arg in enumerate(args) if isinstance(arg, jax.Array)]
        needs = tuple(at in places for at in range(len(args)))

        def forward(*arrays):
            given = dict(enumerate(args)) | dict(zip(places, arrays, strict=True))
            context = Context(needs_input_grad=needs)
            return cls.forward(context, *given.values()), context

        def backward(context, gradients):
            given = gradients if isinstance(gradients, tuple) else (gradients,)
            found = cls.backward(context, *given)
            return tuple((found if isinstance(found, tuple) else (found,))[at] for at in places)

        operation = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
        operation.defvjp(forward, backward)
        return operation(*(args[at] for at in places))
