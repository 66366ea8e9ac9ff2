"""What an installed wheel must do with nothing but the core dependencies beside it.

Not collected by pytest: `nox -s wheel` runs `python -I smoke.py` outside the checkout.
"""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FRAMEWORKS = ("numpy", "torch", "jax", "flax")


def main() -> None:
    assert not any(find_spec(name) for name in FRAMEWORKS), "this environment is not empty"

    import fmapper

    home = Path(fmapper.__file__).parent
    assert home.is_relative_to(sys.prefix), f"tested {home}, not the wheel in {sys.prefix}"
    assert (home / "py.typed").exists(), "the wheel carries no types"
    assert find_spec("fmapper_adapters"), "the adapters are not in the wheel"
    assert find_spec("adapters") is None, "the wheel takes the name of another project"

    @fmapper.functor
    class Dense:
        def __init__(self, weight: list[float], bias: float) -> None:
            self.weight, self.bias = weight, bias

    dense = Dense([1.0, 2.0], 3.0)
    tree = fmapper.fmap(lambda x: 2 * x, {"a": dense, "b": dense})
    assert (tree["a"].weight, tree["a"].bias) == ([2.0, 4.0], 6.0)
    assert tree["a"] is tree["b"], "a tie was lost"
    assert dense.weight == [1.0, 2.0], "the input was changed"

    subprocess.run([sys.executable, "-I", "-m", "fmapper", "devices"], check=True)
    print(f"smoke test passed: fmapper {version('fmapper')} from {home}")


if __name__ == "__main__":
    main()
