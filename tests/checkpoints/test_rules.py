"""Rules against NumPy, there and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper.checkpoints import (
    AddConstant,
    Cast,
    Concatenate,
    Drop,
    Interleave,
    LazyArray,
    Rename,
    Reshape,
    Rules,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)
from support.patience import no_hang

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")


def llama(layers=3, experts=4, hidden=8, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape).astype(dtype)

    found = {"model.embed.weight": make(16, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        found[f"{at}.attn.q_proj.weight"] = make(hidden, hidden)
        found[f"{at}.attn.k_proj.weight"] = make(hidden // 2, hidden)
        found[f"{at}.attn.v_proj.weight"] = make(hidden // 2, hidden)
        for e in range(experts):
            found[f"{at}.mlp.experts.{e}.gate.weight"] = make(6, hidden)
            found[f"{at}.mlp.experts.{e}.up.weight"] = make(6, hidden)
    found["model.norm.weight"] = make(hidden)
    return found


RULES = Rules(
    [
        Rename("model.{rest...}", "{rest...}"),
        Stack("layers.{i}.mlp.experts.{e}.{side:gate|up}.weight", "layers.{i}.mlp.{side}", "e"),
        Concatenate(["layers.{i}.mlp.gate", "layers.{i}.mlp.up"], "layers.{i}.mlp.gate_up", 1),
        Concatenate(
            [f"layers.{{i}}.attn.{x}_proj.weight" for x in "qkv"],
            "layers.{i}.attn.qkv",
            sizes=[8, 4, 4],
        ),
        Transpose("layers.{i}.attn.qkv"),
        Stack("layers.{i}.{rest...}", "layers.{rest...}", over="i"),
        Reshape("layers.attn.qkv", [3, 8, 4, -1], back=[3, 8, 16]),
        Interleave("embed.weight", 2),
        AddConstant("step", [], 3, "int32"),
        Tie("embed.weight", "head.weight"),
    ]
)


def read(arrays):
    return {name: array.read() for name, array in arrays.items()}


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


def test_rules_are_what_numpy_computes():
    given_ = llama()
    found = RULES.apply(given_, reversible=True)
    assert list(found) == [
        "embed.weight",
        "head.weight",
        "layers.attn.qkv",
        "layers.mlp.gate_up",
        "norm.weight",
        "step",
    ]
    qkv = [
        np.concatenate([given_[f"model.layers.{i}.attn.{x}_proj.weight"] for x in "qkv"]).T
        for i in range(3)
    ]
    np.testing.assert_array_equal(found["layers.attn.qkv"].read().reshape(3, 8, 16), np.stack(qkv))
    sides = [
        [
            np.stack([given_[f"model.layers.{i}.mlp.experts.{e}.{x}.weight"] for e in range(4)])
            for x in ("gate", "up")
        ]
        for i in range(3)
    ]
    wanted = np.stack([np.concatenate(pair, 1) for pair in sides])
    np.testing.assert_array_equal(found["layers.mlp.gate_up"].read(), wanted)
    embed = np.stack(np.split(given_["model.embed.weight"], 2), 1).reshape(16, 8)
    np.testing.assert_array_equal(found["head.weight"].read(), embed)
    assert found["step"].read() == 3


def test_the_inverse_gives_everything_back():
    given_ = llama()
    back = read(RULES.inverse().apply(RULES.apply(given_)))
    same(dict(sorted(back.items())), dict(sorted(given_.items())))


def test_one_name_stands_for_a_list_of_one():
    text = """
        [[rules]]
        do = "rename"
        from = "a.{i}"
        to = "b.{i}"

        [[rules]]
        do = "concatenate"
        from = "b.{i}"
        to = "c.{i}"

        [[rules]]
        do = "split"
        from = "c.{i}"
        to = "deep.{i}"

        [[rules]]
        do = "transpose"
        names = "deep.*"
    """
    rules = Rules.from_toml(text)
    assert list(rules.apply({"a.0": np.zeros((2, 3))})) == ["deep.0"]
    assert Split("c", "deep").to == Split("c", ["deep"]).to
    assert Concatenate("deep", "c") == Concatenate(["deep"], "c")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('do = "rename"\nfrom = 3\nto = "b"', r"from is 3\. Write a name .*, or a list of names"),
        ('do = "split"\nfrom = "a"\nto = ["b", 3]', r"to is a list\. .* list of names"),
        ('do = "transpose"\nnames = [["a"]]', r"names is a list\. .* list of names"),
        ('do = "transpose"\nnames = "a"\naxes = 1', r"axes is 1\. Write a list of numbers"),
        ('do = "cast"\nnames = "a"\ndtype = ["b"]', r'dtype is a list\. Write a text as "\.\.\."'),
        ('do = "unstack"\nfrom = "a"\nto = "a.{i}"\nover = "i"\naxis = "0"', "a whole number"),
    ],
)
def test_another_type_is_said_with_what_to_write(fields, said):
    with pytest.raises(fmapper.CheckpointError, match=f"rule 1, .*{said}"):
        Rules.from_toml(f"[[rules]]\n{fields}\n")


def test_rules_go_to_toml_and_back():
    text = RULES.to_toml()
    assert Rules.from_toml(text) == RULES
    assert Rules.from_toml(text).to_toml() == text
    assert "\n    Transpose('layers.{i}.attn.qkv'),\n" in repr(RULES)
    odd = Rules([Rename('a"\\\\b\x7f\u2028.{x}', "\t{x}"), AddConstant("c", [2], float("-inf"))])
    assert Rules.from_toml(odd.to_toml()) == odd
    assert Rules.from_toml(Rules().to_toml()) == Rules()


def test_rules_are_read_from_a_file(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES.to_toml())
    assert Rules.from_toml(path) == Rules.from_toml(str(path)) == RULES
    path.write_text("[[rules]]\ndo = 'fly'\n")
    with pytest.raises(fmapper.CheckpointError, match=r"rules.toml: rule 1: the key do is missing"):
        Rules.from_toml(path)


LETTERS = "abcd"


@st.composite
def random_rules(draw):
    """Arrays by name, and rules that fit them."""
    arrays = {}
    for letter in LETTERS:
        shape = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
        for i in range(draw(st.integers(1, 3))):
            size = int(np.prod(shape))
            array = np.arange(size, dtype=np.int32) + 1000 * (i + 3 * ord(letter))
            arrays[f"m.{i}.{letter}"] = array.reshape(shape)
    found = {name: LazyArray.of(array) for name, array in arrays.items()}
    rules = []
    for number in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(sorted(found)))
        array = found[name]
        axis = draw(st.integers(0, max(array.ndim - 1, 0)))
        kind = draw(st.sampled_from(["rename", "transpose", "reshape", "split", "tie", "constant"]))
        if kind == "rename":
            rule = Rename(name, f"r{number}.{name}")
        elif kind == "constant":
            rule = AddConstant(f"c{number}", [2, 2], number, "int32")
        elif kind == "tie":
            rule = Tie(name, f"t{number}")
        elif kind == "transpose":
            rule = Transpose(name, draw(st.permutations(range(array.ndim))))
        elif kind == "reshape":
            rule = Reshape(name, [-1], array.shape)
        elif array.ndim == 0:
            continue
        elif draw(st.booleans()):
            rule = Unstack(name, f"u{number}.{{i}}", "i", axis)
        elif array.shape[axis] % 2 == 0:
            rule = draw(
                st.sampled_from(
                    [Split(name, [f"s{number}.a", f"s{number}.b"], axis), Interleave(name, 2, axis)]
                )
            )
        else:
            continue
        rules.append(rule)
        found = Rules([rule]).apply(found)
    stacks = [f"m.{{i}}.{x}" for x in LETTERS if all(f"m.{i}.{x}" in found for i in range(3))]
    for name in stacks:
        if len({found[name.format(i=i)].shape for i in range(3)}) == 1:
            rules.append(Stack(name, name.replace(".{i}", ""), "i"))
    return arrays, Rules(rules)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@given(random_rules())
def test_random_rules_and_their_inverse_are_the_identity(case):
    arrays, rules = case
    assert Rules.from_toml(rules.to_toml() or "rules = []") == rules
    back = rules.inverse().apply(rules.apply(arrays, reversible=True))
    same(dict(sorted(read(back).items())), dict(sorted(arrays.items())))


def test_names_change_at_the_same_time():
    arrays = {"norm0": np.zeros(1), "norm1": np.ones(1), "norm10": np.ones(2)}
    found = Rules([Rename({"norm0": "norm1", "norm1": "norm2"})]).apply(arrays)
    assert {name: array.shape for name, array in found.items()} == {
        "norm1": (1,),
        "norm2": (1,),
        "norm10": (2,),
    }
    found = Rules([Rename({"norm1": "x", "{any...}": "y.{any...}"})]).apply(arrays)
    assert [*found] == ["y.norm0", "x", "y.norm10"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Transpose("x.*"), r"rule 1, Transpose\('x\.\*'\): matches nothing.*model\.embed\.weight"),
        (
            Transpose("*.norm.weight"),
            r"model.norm.weight: bfloat16\[8\] has no axis 1, in Transpos",
        ),
        (
            Rename("model.norm.weight", "model.embed.weight"),
            "two arrays would be named model.embed",
        ),
        (AddConstant("model.norm.weight", [1], 0), "model.norm.weight exists already"),
        (
            Concatenate(["model.layers.{i}.attn.q_proj.weight", "model.layers.{i}.attn.w"], "{i}"),
            r"there is model.layers.0.attn.q_proj.weight, but no model.layers.0.attn.w",
        ),
        (
            Concatenate([f"model.layers.{{i}}.attn.{x}_proj.weight" for x in "qk"], "{i}"),
            r"0: the arrays have the sizes \[8, 4\]: write sizes=\[8, 4\], in Concatenate",
        ),
        (Split("model.norm.weight", ["a", "b", "c"]), r"cannot be split into 3 .*in Split"),
        (Stack("model.{i}.weight", "w", "i"), "'embed' is not a number"),
        (Reshape("model.norm.weight", [4, 2], back=[9]), r"has shape \[8\], not \[9\]"),
        (Interleave("model.norm.weight", 3), "cannot be split into 3 equal parts"),
        (Drop("model.norm.weight", tied_to="model.w"), "but there is no model.w"),
    ],
)
def test_what_does_not_fit_names_rule_and_array(rule, message):
    with pytest.raises(fmapper.CheckpointError, match=message):
        Rules([rule]).apply(llama())


def test_a_missing_layer_is_named():
    arrays = llama()
    del arrays["model.layers.1.attn.q_proj.weight"]
    rule = Stack("model.layers.{i}.attn.q_proj.weight", "q", "i")
    with pytest.raises(fmapper.CheckpointError, match=r"but no model.layers.1.attn.q_proj.weight"):
        Rules([rule]).apply(arrays)
    numbered = Stack("model.layers.{i:0-3}.attn.k_proj.weight", "k", "i")
    with pytest.raises(fmapper.CheckpointError, match=r"but no model.layers.3.attn.k_proj.weight"):
        Rules([numbered]).apply(arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rename("a.{i}", "b"), "does not have the captures"),
        (lambda: Rename("a.*", "b.*"), "in place of the star"),
        (lambda: Rename(["a", "b"], "c"), "2 old names, but 1 new ones"),
        (lambda: Stack("a.{i}", "a.{i}", "i"), "must occur in"),
        (lambda: Stack("a.{i}", "a", "j"), "does not have"),
        (lambda: Split("a", ["b", "b"]), "must be distinct"),
        (lambda: Split("a", ["b", "c"], sizes=[1]), "2 names, but sizes"),
        (lambda: Transpose("a", [0, 0]), "not a permutation of axes"),
        (lambda: AddConstant("a", [-1], 0), "not a valid shape"),
        (lambda: AddConstant("a", [1 << 50], 0), "too large"),
        (lambda: AddConstant("a.{i}", [1], 0), "must not contain captures"),
        (lambda: AddConstant("a", [1], 0, "object"), "is not a dtype"),
        (lambda: AddConstant("a", [1], 1000, "int8"), "1000 does not fit"),
        (lambda: Cast("a", "int8"), "not a floating or complex dtype"),
    ],
)
def test_what_is_no_rule_is_said_when_it_is_made(make, message):
    with pytest.raises(fmapper.CheckpointError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Cast("*", "float16"), "Cast.* has no inverse: what it rounds is not kept"),
        (Drop("a"), "what it drops is not kept"),
        (Reshape("a", [-1]), "write back="),
    ],
)
def test_what_has_no_inverse_is_named(rule, message):
    with pytest.raises(fmapper.CheckpointError, match=message):
        Rules([rule]).inverse()


def test_an_inverse_that_would_take_more_is_said():
    rules = Rules([Rename("a.{x}", "b.{x}")])
    arrays = {"a.1": np.zeros(1), "b.2": np.zeros(1)}
    assert set(rules.apply(arrays)) == {"b.1", "b.2"}
    with pytest.raises(fmapper.CheckpointError, match=r"does not give .* back"):
        rules.apply(arrays, reversible=True)


def test_a_cast_that_loses_a_value_names_the_array():
    found = Rules([Cast("*", "float16")]).apply({"w": np.array([1e9], np.float32)})
    with pytest.raises(fmapper.LossyCastError, match="w: finite values become infinite"):
        found["w"].read()


def test_a_rule_that_matches_nothing_may_be_allowed():
    rules = Rules([Transpose("x")])
    assert set(rules.apply({"y": np.zeros(1)}, strict=False)) == {"y"}


def test_rules_are_made_of_rules():
    with pytest.raises(TypeError, match="Rules takes rules"):
        Rules(["a"])
    assert len(RULES + Rules([Drop("x")])) == len(RULES) + 1
    assert hash(RULES) == hash(Rules(list(RULES)))


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "rules = 1\n",
        "rules = [1]\n",
        "[[rules]]\ndo = 1\n",
        "[[rules]]\ndo = 'rename'\n",
        "[[rules]]\ndo = 'rename'\nfrom = ['a']\nto = [1]\n",
        "[[rules]]\ndo = 'transpose'\nnames = 'a'\naxes = [0, true]\n",
        "[[rules]]\ndo = 'interleave'\nnames = 'a'\ngroups = 99999999999999999\n",
        "[[rules]]\ndo = 'drop'\nnames = 'a'\n__class__ = 'b'\n",
        "[[rules]]\ndo = 'reshape'\nnames = 'a'\nshape = [nan]\n",
        "[[rules]]\ndo = 'rename'\nfrom = '{a'\nto = 'b'\n",
        "[[rules]]\ndo = 'constant'\nname = 'a'\nshape = [1]\nvalue = '1'\n",
        "x = " + "1" * 10_000 + "\n",
        "x = " + "[" * 100_000 + "\n",
        "a" + ".a" * 200_000 + " = 1\n",
        'a = """\n' + '"b\n' * 10,
        "a = {b." + "b." * 100_000 + "b = 1}\n",
        "a = " + '"\\' * 200_000 + "\n",
        "[[rules]]\n" * 40_000,
        "\x00\n",
    ],
)
def test_hostile_text_is_one_error_and_no_time(text):
    with no_hang(), pytest.raises(fmapper.CheckpointError):
        Rules.from_toml(text)
