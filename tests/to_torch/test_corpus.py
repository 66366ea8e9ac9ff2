"""A spread of JAX's own corpus of primitives; `nox -s lax` runs more of it."""

import pytest

from sweeps import lax as sweep_lax

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
jax = pytest.importorskip("jax")

# Groups on whose lowerings others work are in their own tests.
GROUPS = (
    "^(add|and|approx_top_k|argm|bitcast|cbrt|clamp|complex|conj|convert_el|cum|digamma|div|eq|erf"
    "|exp|igamma|integer_pow|iota$|lgamma|log|max|min|mul|nextafter|population|pow|reduce($|_[amops])"
    "|regularized|rem|round|rsqrt|select_n|shift|sign|sort|sqrt|sub|tan|top_k|xor)"
)


def sample():
    options = sweep_lax.parser().parse_args(["--group", GROUPS, "--per", "1", "--limit", "110"])
    harnesses = sweep_lax.corpus()
    return [harnesses[name] for name in sweep_lax.chosen(harnesses, options)]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # those of JAX's own code
def test_a_sample_of_the_corpus_is_right():
    found = {h.fullname: sweep_lax.outcome_of(h) for h in sample()}
    wrong = {n: f for n, f in found.items() if f[0] not in ("right", "not run")}
    assert not wrong
    assert sum(outcome == "right" for outcome, _ in found.values()) > 90


def test_the_comparison_sees_what_is_wrong():
    x = jax.numpy.asarray([0.0, 1.0, np.nan, np.inf], "float32")
    for other in ([-0.0, 1, np.nan, np.inf], [0, 1.00001, np.nan, np.inf],
                  [0, 1, 0, np.inf], [0, 1, np.nan, -np.inf]):  # fmt: skip
        assert sweep_lax.differs(jax.numpy.asarray(other, "float32"), x)
    assert sweep_lax.differs(x, x) == ""
    assert sweep_lax.differs(x.astype("float16"), x)
    assert sweep_lax.differs(x[None], x)
    assert sweep_lax.differs(jax.numpy.arange(3), jax.numpy.arange(1, 4))
