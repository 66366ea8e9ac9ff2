"""Placing by rules: parts of a model, named by path or class, to devices of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper import (
    NotAFunctorError,
    Placement,
    PlacementError,
    cast,
    fmap,
    functor,
    keep,
    place,
    plan,
    state,
    to_numpy,
    to_torch,
)

np = pytest.importorskip("numpy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@functor
class Block:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


class Wide(Block):
    pass


class Undeclared:
    def __init__(self) -> None:
        self.w = np.ones(1)


def ones(n: int = 1) -> Any:
    return np.ones(n)


def model() -> Any:
    layers = [Block(w=ones(), norm=Block(w=ones())) for _ in range(12)]
    return Block(encoder=Block(layers=layers, emb=ones(3)), head=Wide(w=ones(), n=np.arange(2)))


def halves(tree: Any) -> set[str]:
    """The names of the arrays that are float16 now."""
    return {name for name, array in state(tree).items() if array.dtype == np.float16}


# --- the pattern language -----------------------------------------------------------------------

LAYERS = {f"encoder.layers.{i}.{rest}" for i in range(12) for rest in ("w", "norm.w")}
ALL = LAYERS | {"encoder.emb", "head.w"}


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("head", {"head.w"}),
        ("model.head", {"head.w"}),
        ("encoder.emb", {"encoder.emb"}),
        ("encoder.*", ALL - {"head.w"}),
        ("encoder", ALL - {"head.w"}),
        ("encoder.layers[1]", {"encoder.layers.1.w", "encoder.layers.1.norm.w"}),
        ("encoder.layers.1", {"encoder.layers.1.w", "encoder.layers.1.norm.w"}),
        ("model.encoder.layers[1].w", {"encoder.layers.1.w"}),
        ("encoder.layers[*].w", {name for name in LAYERS if name.endswith(".w")}),
        ("encoder.layers.1*.norm", {f"encoder.layers.{i}.norm.w" for i in (1, 10, 11)}),
        ("encoder.layers[9:11].norm", {f"encoder.layers.{i}.norm.w" for i in (9, 10)}),
        ("encoder.layers[:1]", {"encoder.layers.0.w", "encoder.layers.0.norm.w"}),
        ("*[10:].norm", {f"encoder.layers.{i}.norm.w" for i in (10, 11)}),
        ("*norm*", {name for name in LAYERS if "norm" in name}),
        ("*.norm.w", {name for name in LAYERS if "norm" in name}),
        ("encoder.{list}.{i:9-11}.norm", {f"encoder.layers.{i}.norm.w" for i in (9, 10, 11)}),
        ("encoder.layers.1{i}.w", {f"encoder.layers.{i}.w" for i in (10, 11)}),
        ("{any...}.{part:emb|norm}", {name for name in ALL if "norm" in name or "emb" in name}),
        ("*", ALL),
        ("**", ALL),
        ("", ALL),
        ("model", ALL),
        ("model.*", ALL),
        ("['head']['w']", {"head.w"}),
        (Wide, {"head.w"}),
        (Block, ALL),
        (np.ndarray, ALL),
        (list, LAYERS),
    ],
)
def test_what_a_rule_takes(pattern: Any, taken: set[str]) -> None:
    tree = model()
    new = place(tree, {pattern: "float16"})
    assert halves(new) == taken
    assert halves(tree) == set(), "the input is never changed"
    old, got = state(tree), state(new)
    assert all(got[name] is old[name] for name in old if name not in taken)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("model", {"model.w", "model.b"}),
        ("model.w", {"model.w"}),
        ("w", {"w"}),
        ("*l", {"model.w", "model.b"}),
    ],
)
def test_a_child_called_model_comes_before_the_root(pattern: str, taken: set[str]) -> None:
    tree = {"model": {"w": ones(), "b": ones()}, "w": ones()}
    assert halves(place(tree, {pattern: "float16"})) == taken


@pytest.mark.parametrize("pattern", ["a.b", "['a.b']", "*.b"])
def test_keys_with_dots(pattern: str) -> None:
    tree = {"a.b": ones(), "c": ones()}
    assert halves(place(tree, {pattern: "float16"})) == {"a.b"}


def test_keys_with_brackets() -> None:
    tree = {"a[0]": ones(), "a": [ones()], "b*": ones(), "b": ones()}
    assert halves(place(tree, {r"a\[0\]": "float16"})) == {"a[0]"}
    assert halves(place(tree, {"['a[0]']": "float16", r"b\*": "float16"})) == {"a[0]", "b*"}


def test_a_quoted_dot_is_no_border() -> None:
    with pytest.raises(PlacementError, match="matches nothing"):
        place({"a": {"b": ones()}}, {"['a.b']": "float16"})


def test_a_tree_that_is_one_leaf() -> None:
    for pattern in ("*", "", "model", np.ndarray):
        assert place(ones(), {pattern: "float16"}).dtype == np.float16


@pytest.mark.parametrize("pattern", ["a[", "a[x]", "a[-1]", "[1:2:3]", "a]["])
def test_patterns_that_cannot_be_read(pattern: str) -> None:
    with pytest.raises(PlacementError, match="is not a path pattern: cannot parse"):
        Placement({pattern: "cpu"})


def test_a_range_counts_from_the_front() -> None:
    with pytest.raises(PlacementError, match="counts from the start"):
        Placement({"layers[-2:]": "cpu"})


@pytest.mark.parametrize("rules", [{}, "cpu", {3: "cpu"}, {("a", "b"): "cpu"}])
def test_rules_that_are_none(rules: Any) -> None:
    with pytest.raises(PlacementError):
        Placement(rules)


@pytest.mark.parametrize("target", ["gpuu", None, 3, object()])
def test_targets_that_are_none(target: Any) -> None:
    with pytest.raises(fmapper.DeviceError, match=r"neither a device nor a dtype"):
        Placement({"*": target})
    with pytest.raises(PlacementError, match="not further rules"):
        Placement({"*": Placement({"*": "cpu"})})


# --- which rule wins ----------------------------------------------------------------------------


def test_the_first_match_wins_and_the_bare_star_is_for_the_rest() -> None:
    rules = {"*": "float16", "*norm*": "float32", "encoder": keep}
    new = state(place(model(), rules))
    dtypes = {name: array.dtype.name for name, array in new.items()}
    assert dtypes["encoder.layers.3.norm.w"] == "float32"
    assert dtypes["encoder.layers.3.w"] == dtypes["encoder.emb"] == "float64"
    assert dtypes["head.w"] == "float16"
    assert dtypes["head.n"] == "int64"


def test_the_example_of_cast() -> None:
    new = state(cast(model(), {"*": "bfloat16", "*norm*": "float32"}))
    for name, array in new.items():
        wanted = "float32" if "norm" in name else "int64" if name == "head.n" else "bfloat16"
        assert array.dtype.name == wanted


def test_the_example_of_place(torch: Any) -> None:
    class BatchNorm(torch.nn.BatchNorm1d):  # type: ignore[name-defined, misc]
        pass

    net = torch.nn.ModuleDict(
        {
            "encoder": torch.nn.Sequential(torch.nn.Linear(2, 2)),
            "decoder": torch.nn.Sequential(torch.nn.Linear(2, 2)),
            "norm": BatchNorm(2),
        }
    )
    new = place(net, {"encoder.*": "meta", "decoder.*": "cpu", BatchNorm: keep})
    on = {name: array.device.type for name, array in state(new).items()}
    assert {name for name in on if on[name] == "meta"} == {"encoder.0.weight", "encoder.0.bias"}
    assert new["norm"].weight is net["norm"].weight
    assert new["decoder"][0].weight is net["decoder"][0].weight


def test_a_class_holds_for_all_that_is_below_it() -> None:
    tree = {"a": Wide(inner={"w": ones()}), "b": Block(w=ones())}
    assert halves(place(tree, {Wide: "float16"})) == {"a.inner.w"}
    assert halves(place(tree, {Wide: keep, "*": "float16"})) == {"b.w"}


def test_rules_that_match_nothing_name_what_is_close() -> None:
    with pytest.raises(PlacementError) as caught:
        place(model(), {"encoder.embb": "cpu", "head": "cpu", dict: "cpu"})
    first, second = str(caught.value).splitlines()
    assert "'encoder.embb' matches nothing" in first
    assert "encoder.emb" in first.partition("the tree has")[2]
    assert "dict matches nothing" in second


def test_a_rule_that_comes_too_late_is_said() -> None:
    with pytest.raises(PlacementError, match=r"'\*norm\*' never applies.*norm"):
        place(model(), {"encoder": "float16", "*norm*": keep})


def test_cast_takes_one_dtype_and_no_devices() -> None:
    assert halves(cast(model(), "float16")) == ALL
    assert halves(cast(model(), np.float16)) == ALL
    for wrong in ("cpu", "int8", {"*": "cpu"}, {"*": to_numpy}):
        with pytest.raises(ValueError, match="not a floating or complex dtype"):
            cast(model(), wrong)


def test_a_dtype_leaves_backend_and_device_alone(torch: Any) -> None:
    tree = {"t": torch.ones(1), "m": torch.ones(1, device="meta"), "n": ones()}
    new = cast(tree, "float16")
    assert (new["t"].dtype, new["m"].device.type) == (torch.float16, "meta")
    assert new["n"].dtype == np.float16


# --- ties ---------------------------------------------------------------------------------------


def test_ties_are_kept_and_go_along_with_the_place_that_has_a_rule() -> None:
    w = ones()
    new = place({"a": w, "b": [w]}, {"a": "float16"})
    assert new["a"] is new["b"][0]
    assert new["a"].dtype == np.float16
    shared = Block(w=ones())
    new = place({"a": shared, "b": [shared]}, {"b": "float16"})
    assert new["a"] is new["b"][0]
    assert new["a"].w.dtype == np.float16


@pytest.mark.parametrize("rules", [{"a": "float16", "b": "float32"}, {"b": keep, "*": "float16"}])
@pytest.mark.parametrize("whole", [False, True])
def test_ties_across_two_targets_name_both_paths_and_rules(rules: Any, whole: bool) -> None:
    w = ones()
    node = Block(w=w)
    tree = {"a": node, "b": node} if whole else {"a": Block(w=w), "b": Block(w=w)}
    with pytest.raises(PlacementError) as caught:
        place(tree, rules)
    message = str(caught.value)
    for part in ("model.a.w", "model.b.w", *map(repr, rules), *map(repr, rules.values())):
        assert part in message
    (said,) = plan(Placement(rules), tree)
    assert said.action == "refused"
    assert "are the same object" in said.reason


def test_two_words_for_one_place_are_no_contradiction() -> None:
    w = ones()
    tree = {"a": w, "b": w}
    assert place(tree, {"a": "cpu", "b": "numpy:cpu"}) == tree
    assert place(tree, {"a": keep, "b": to_numpy}) == tree
    new = place(tree, {"a": "float16", "b": to_numpy(dtype="float16")})
    assert new["a"] is new["b"]


def test_views_across_two_targets(torch: Any) -> None:
    w = torch.ones(2, 3)
    tree = {"w": w, "t": w.T, "other": torch.ones(2)}
    with pytest.raises(PlacementError, match=r"model\.t is a view of model\.w.*'w'|model\.w") as e:
        place(tree, {"w": "float16"})
    assert "no rule names it" in str(e.value)
    assert place(tree, {"other": "float16"})["t"] is tree["t"]
    new = place(tree, {"w": "float16", "t": "float16"})
    assert new["t"].untyped_storage().data_ptr() == new["w"].untyped_storage().data_ptr()
    said = {str(leaf.path): leaf.action for leaf in plan(Placement({"w": "float16"}), tree)}
    assert said == {"w": "cast", "t": "refused", "other": "skipped"}


def test_cycles() -> None:
    root = Block(encoder=Block(w=ones()), decoder=Block(w=ones()))
    root.encoder.parent = root
    new = place(root, {"encoder": "float16"})
    assert new.encoder.parent is new
    assert (new.encoder.w.dtype, new.decoder.w.dtype) == (np.float16, np.float64)


def test_many_paths_to_one_leaf_take_no_time() -> None:
    tree: Any = {"w": ones()}
    for _ in range(60):  # 2 ** 60 paths
        tree = {"a": tree, "b": tree}
    assert list(fmap(Placement({"*w": "float16"}), tree)) == ["a", "b"]


# --- as a mover ---------------------------------------------------------------------------------


def test_a_placement_is_a_mover(torch: Any) -> None:
    reports: list[Any] = []
    placement = Placement({"encoder": to_torch, "head": "float16"}, report=reports.append)
    new = fmap(placement, model())
    assert type(new.encoder.emb) is torch.Tensor
    assert halves(new) == {"head.w"}
    assert reports == [plan(placement, model())]
    actions = {str(leaf.path): leaf.action for leaf in reports[0]}
    assert actions["encoder.emb"] == "moved"
    assert (actions["head.w"], actions["head.n"]) == ("cast", "skipped")
    loader = fmapper.DeviceLoader([{"head": ones()}], Placement({"head": "float16"}), prefetch=1)
    assert [batch["head"].dtype for batch in loader] == [np.float16]
    assert repr(Placement({"a": "cpu", Wide: keep})) == "Placement({'a': 'cpu', Wide: keep})"


def test_a_plan_says_what_stays_and_why() -> None:
    tree = {"a": ones(), "b": ones(), "c": ones()}
    made = plan(Placement({"a": "float16", "b": keep}), tree)
    assert [(leaf.action, leaf.reason) for leaf in made] == [
        ("cast", "if its values fit"),
        ("skipped", "the rule 'b' keeps it"),
        ("skipped", "no rule names it"),
    ]


def test_all_or_nothing(torch: Any) -> None:
    done: list[Any] = []
    tree = {"a": ones(), "b": np.array([1e300])}
    with pytest.raises(fmapper.DeviceUnavailableError, match=r"model\.b.*cuda:99"):
        place(tree, {"a": to_torch(report=done.append), "b": to_torch(device="cuda:99")})
    assert not done, "nothing is begun if it is known beforehand that something cannot be done"
    with pytest.raises(fmapper.LossyCastError, match=r"model\.b"):
        place(tree, {"a": to_torch, "b": "float16"})
    assert {array.dtype for array in tree.values()} == {np.dtype("float64")}


def test_only_what_moves_must_be_declared() -> None:
    tree = {"a": ones(), "b": Undeclared()}
    assert halves(place({"a": ones()}, {"a": "float16"})) == {"a"}
    new = place(tree, {"a": "float16"})
    assert new["b"] is tree["b"]
    with pytest.raises(NotAFunctorError, match=r"model\.b"):
        place(tree, {"*": "float16"})
    assert place(tree, {"*": "float16"}, strict=False)["b"] is tree["b"]


def test_a_mover_of_ones_own_options(torch: Any) -> None:
    tree = {"a": ones(), "b": ones()}
    new = place(tree, {"a": to_numpy(copy=True), "b": to_numpy})
    assert new["a"] is not tree["a"]
    assert new["b"] is tree["b"]


def test_random_generators_go_along(torch: Any) -> None:
    tree = {"g": torch.Generator(), "w": torch.ones(1)}
    new = place(tree, {"g": "cpu", "w": "float16"})
    assert new["g"] is tree["g"]
    assert new["w"].dtype == torch.float16


def test_nodes_that_is_leaf_made_leaves() -> None:
    tree = {"a": [ones()], "b": [ones()]}
    new = fmap(Placement({"a": "float16"}), tree, is_leaf=lambda x: isinstance(x, list))
    assert (new["a"][0].dtype, new["b"]) == (np.float16, tree["b"])


@pytest.mark.gpu("torch")
def test_on_a_gpu(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    new = place(net, {"[0]": "cuda:0", "[1]": "cpu"})
    assert (new[0].weight.device.type, new[1].weight.device.type) == ("cuda", "cpu")
    tied = {"a": net[0].weight, "b": net[0].weight}
    with pytest.raises(PlacementError, match=r"model\.a and model\.b are the same"):
        place(tied, {"a": "cuda:0", "b": "cpu"})


# --- against brute force ------------------------------------------------------------------------

KEYS = ("a", "b", "norm", "a1")
TARGETS = ("float16", "float32", keep)


@st.composite
def trees(draw: st.DrawFn) -> Any:
    pool: list[Any] = []

    def grow(depth: int) -> Any:
        if pool and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(pool))
        kind = draw(st.integers(0, 3 if depth else 0))
        new: Any
        if kind == 0:
            new = ones()
        elif kind == 1:
            new = [grow(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        else:
            keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
            children = {key: grow(depth - 1) for key in keys}
            new = children if kind == 2 else draw(st.sampled_from((Block, Wide)))(**children)
        pool.append(new)
        return new

    return grow(3)


patterns = st.one_of(
    st.lists(st.sampled_from((*KEYS, "*", "[0]", "[1:]", "*a", "no*")), min_size=1, max_size=3).map(
        lambda parts: ".".join(parts).replace(".[", "[")
    ),
    st.sampled_from((Wide, list, np.ndarray)),
)


def everything(tree: Any, name: str = "", above: tuple[Any, ...] = ()) -> Any:
    """The (name, object) pairs from the root to a place, for every place of a tree."""
    here = (*above, (name, tree))
    yield here
    for key, child in fmapper.children(tree).items():
        yield from everything(child, f"{name}.{key}" if name else f"{key}", here)


def matches(pattern: Any, line: Any) -> bool:
    if isinstance(pattern, type):
        return any(isinstance(thing, pattern) for _, thing in line)
    dotted = pattern.replace("[0]", ".0").replace("[1:]", ".R")
    dotted = dotted[1:] if pattern.startswith("[") else dotted
    regex = re.escape(dotted).replace(r"\*", ".*").replace("R", r"[1-9]\d*")
    return any(re.fullmatch(regex, name) for name, _ in line)


@pytest.mark.nightly
@given(trees(), st.dictionaries(patterns, st.sampled_from(TARGETS), min_size=1, max_size=3))
@settings(max_examples=400)
def test_as_brute_force_says(tree: Any, rules: dict[Any, Any]) -> None:
    order = sorted(rules, key=lambda pattern: pattern == "*")
    wanted: dict[int, set[str | None]] = {}
    won, met = set(), set()
    for line in everything(tree):
        hits = [pattern for pattern in order if matches(pattern, line)]
        met.update(hits)
        won.update(hits[:1])
        if isinstance(line[-1][1], np.ndarray):
            wanted.setdefault(id(line[-1][1]), set()).add(
                None if not hits else "float64" if rules[hits[0]] is keep else rules[hits[0]]
            )
    fails = {
        "matches nothing": met != set(rules),
        "never applies": won != met,
        "the same object": any(len(dtypes - {None}) > 1 for dtypes in wanted.values()),
    }
    for says, fails_so in fails.items():
        if fails_so:
            with pytest.raises(PlacementError, match=says):
                place(tree, rules)
            return
    new = place(tree, rules)
    olds = [line[-1][1] for line in everything(tree)]
    news = [line[-1][1] for line in everything(new)]
    assert list(map(type, olds)) == list(map(type, news))
    for old, got in zip(olds, news, strict=True):
        if isinstance(old, np.ndarray):
            (dtype,) = wanted[id(old)] - {None} or {"float64"}
            assert got.dtype.name == dtype
            assert (got is old) == (dtype == "float64")
    assert [[a is b for b in olds] for a in olds] == [[a is b for b in news] for a in news]


def test_an_optimizer_goes_with_its_model() -> None:
    """Its counters keep their dtype, and alone it is refused."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    new_net, new_optimizer = cast((net, optimizer), "float64")
    assert new_net.weight.dtype == torch.float64
    assert new_optimizer.param_groups[0]["params"][0] is new_net.weight
    state = new_optimizer.state[new_net.weight]
    assert state["exp_avg"].dtype == torch.float64
    assert state["step"].dtype == torch.float32
    with pytest.raises(fmapper.MoveError, match="AdamW works on arrays that nothing else"):
        cast(optimizer, "float64")


def test_the_state_of_an_optimizer_follows_its_parameter() -> None:
    """Rules name places in the model; a norm in float32 takes its moments along."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    for rules in (
        {"*": "bfloat16", torch.nn.LayerNorm: "float32"},
        {"[0][0]": "bfloat16"},
        {"[0]": "bfloat16", "[1]": "float64"},
    ):
        new_net, new = cast((net, optimizer), rules)
        for parameter, entries in new.state.items():
            assert any(parameter is own for own in new_net.parameters())
            assert entries["exp_avg"].dtype == parameter.dtype
            assert entries["step"].dtype == torch.float32
        assert new_net[0].weight.dtype == torch.bfloat16
        new_net[0](torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        new.step()
    there, state = place((net, optimizer), {"[0]": "meta"})
    assert all(v["exp_avg"].device.type == "meta" for v in state.state.values())
    assert there[0].weight.device.type == "meta"


def test_a_view_that_another_rule_takes_to_the_same_place_stays_a_view() -> None:
    w = np.arange(4.0)
    new = place({"a": w, "b": w[:2]}, {"a": fmapper.to_cpu(dtype="float32"), "b": "float32"})
    assert np.shares_memory(new["a"], new["b"])
    assert new["b"].dtype == np.float32


def test_a_mover_among_rules_reports_what_it_takes() -> None:
    told: list[str] = []

    def note(name: str) -> Any:
        return lambda plan: told.append(f"{name}: {[str(leaf.path) for leaf in plan]}")

    tree = {"a": np.ones(1), "b": np.ones(1)}
    rules = {"a": fmapper.to_numpy(dtype="float32", report=note("mover")), "*": "float16"}
    fmapper.place(tree, rules, report=note("all"))
    assert told == ["all: ['a', 'b']", "mover: ['a']"]
