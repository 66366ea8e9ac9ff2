"""A framework of its own, taught to fmapper: a toy of forty lines, and the adapter for it.

Run it with `python examples/custom_adapter.py`. A package would ship the adapter through the entry
point group `fmapper.adapters`; here it is registered by hand. The suite in
`tests/support/conformance.py` checks it.
"""

from __future__ import annotations

import argparse
import array
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import fmapper

# --- the framework -------------------------------------------------------------------------------

CODES = {
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
}
NAMES = {code: name for name, code in CODES.items()}
PLACES = ("cpu", "acc:0", "acc:1")


class Tensor:
    """An `array.array` with a shape, on the CPU or on a make-believe accelerator."""

    def __init__(self, numbers: array.array[Any], shape: Sequence[int], place: str = "cpu") -> None:
        if len(numbers) != math.prod(shape):
            raise ValueError(f"{len(numbers)} numbers do not have the shape {tuple(shape)}")
        if place not in PLACES:
            raise ValueError(f"there is no {place}")
        self.numbers, self.shape, self.place = numbers, tuple(shape), place

    def __matmul__(self, other: Tensor) -> Tensor:
        """The product of two matrices, where they are."""
        if self.place != other.place:
            raise ValueError(f"one matrix is on {self.place}, the other on {other.place}")
        (rows, inner), (_, columns) = self.shape, other.shape
        a, b = self.numbers, other.numbers
        sums = (
            sum(a[i * inner + k] * b[k * columns + j] for k in range(inner))
            for i in range(rows)
            for j in range(columns)
        )
        return Tensor(array.array(a.typecode, sums), (rows, columns), self.place)

    def tolist(self) -> list[Any]:
        """The numbers, as a nested list."""
        found: list[Any] = list(self.numbers)
        for n in reversed(self.shape[1:]):
            found = [found[i : i + n] for i in range(0, len(found), n)]
        return found


# --- its adapter ---------------------------------------------------------------------------------


class ToyAdapter(fmapper.backends.Adapter):
    """All that fmapper needs to know of the toy."""

    name: ClassVar[str] = "toy"
    aliases: ClassVar[dict[str, str]] = {"gpu": "acc"}

    def is_array_type(self, cls: type) -> bool:
        return issubclass(cls, Tensor)

    def device(self, array: Tensor) -> fmapper.Device:
        kind, _, index = array.place.partition(":")
        return fmapper.Device("toy", kind, int(index) if index else None)

    def dtype(self, array: Tensor) -> str:
        return NAMES[array.numbers.typecode]

    def shape(self, array: Tensor) -> tuple[int, ...]:
        return array.shape

    def devices(self) -> list[fmapper.Device]:
        accelerators = [fmapper.Device("toy", "acc", index) for index in range(2)]
        return [fmapper.Device("toy", "cpu"), *accelerators]

    def to_device(
        self, arrays: Sequence[Tensor], device: fmapper.Device, *, copy: bool | None
    ) -> Iterator[Tensor]:
        for old in arrays:
            yield Tensor(old.numbers[:], old.shape, _place(device))

    def storable(self, dtype: str) -> str | None:
        return dtype if dtype in CODES else None

    def export(self, arrays: Sequence[Tensor], target: fmapper.Device) -> fmapper.backends.Exchange:
        """NumPy views of numbers on the CPU, private copies of those on the accelerator."""
        import numpy as np

        data = []
        for old in arrays:
            dtype = self.dtype(old)
            numbers = old.numbers if old.place == "cpu" else old.numbers[:]
            flat = np.frombuffer(numbers, dtype) if numbers else np.empty(0, dtype)
            data.append(flat.reshape(old.shape))
        private = [at for at, old in enumerate(arrays) if old.place != "cpu"]
        return fmapper.backends.Exchange(data, private=private)

    def take(
        self, exchange: fmapper.backends.Exchange, device: fmapper.Device, *, share: bool
    ) -> Iterator[Tensor]:
        """Always a copy: an `array.array` cannot be laid on memory that is there already."""
        for data in exchange.data:
            if share:
                raise BufferError("a toy tensor has memory of its own")
            if data.dtype.name not in CODES:
                raise TypeError(f"the toy has no dtype {data.dtype.name}")
            numbers = array.array(CODES[data.dtype.name], data.tobytes())
            yield Tensor(numbers, data.shape, _place(device))

    def cast(self, array: Tensor, dtype: str) -> tuple[Tensor, bool]:
        """By way of NumPy; the base class would say that it cannot."""
        import numpy as np

        old = np.array(array.tolist() if array.shape else array.numbers[0], self.dtype(array))
        with np.errstate(all="ignore"):
            new = old.astype(dtype)
        (made,) = self.take(fmapper.backends.Exchange([new]), self.device(array), share=False)
        if old.dtype.kind == new.dtype.kind == "f":
            return made, not (~np.isfinite(new) & np.isfinite(old)).any()
        return made, new.tolist() == old.tolist()  # exact, unlike NumPy's comparison


def _place(device: fmapper.Device) -> str:
    return str(device).removeprefix("toy:")


to_toy = fmapper.Mover("to_toy", backend="toy")


# --- a model on it -------------------------------------------------------------------------------


@fmapper.functor
class Linear:
    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, x: Any) -> Any:
        return x @ self.weight


@fmapper.functor
class Autoencoder:
    """Its encoder and its decoder are one layer: a tie, which every move keeps."""

    def __init__(self, layer: Linear) -> None:
        self.encoder = self.decoder = layer

    def __call__(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import numpy as np

    fmapper.backends.register_adapter(ToyAdapter())
    try:
        weight = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0]], np.float32)
        x = np.array([[1.0, 2.0, 3.0]], np.float32)
        model = Autoencoder(Linear(weight))
        report("numpy", model, x)

        toy = fmapper.fmap(to_toy, model)
        report("numpy -> toy", toy, to_toy(x))

        there = fmapper.fmap(fmapper.to_device("toy:acc:0"), toy)
        report("-> its accelerator", there, to_toy(x, device="toy:acc:0"))

        last = there
        if find_spec("torch") is not None:
            last = fmapper.fmap(fmapper.to_torch(device="cpu"), there)
            report("-> torch", last, fmapper.to_torch(x))

        back = fmapper.fmap(fmapper.to_numpy, last)
        report("-> numpy", back, x)
        assert np.array_equal(back.encoder.weight, weight)
    finally:
        fmapper.backends.unregister_adapter("toy")


def report(step: str, model: Autoencoder, x: Any) -> None:
    device = fmapper.get_device(model)
    tie = "tied" if model.encoder is model.decoder else "torn apart"
    print(f"{step:<20} {device!s:<10} {tie:<6} {model(x).tolist()}")


if __name__ == "__main__":
    main()
