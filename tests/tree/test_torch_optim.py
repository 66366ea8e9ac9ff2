"""Optimizers move with the module that they train, and go on as an unmoved twin does."""

import copy

import pytest

import fmapper
from fmapper import fmap, move_, to_cpu, to_torch

torch = pytest.importorskip("torch")
nn, optim = torch.nn, torch.optim

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: optim.Muon([x for x in p if x.ndim == 2], lr=0.01)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, optimizer, steps=3, start=0):
    for step in range(start, start + steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        x = x.to(next(model.parameters()))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def assert_equal_but_apart(model, twin):
    for new, old in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(new, old)
        assert new.data_ptr() != old.data_ptr()


@pytest.fixture
def pair():
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["model first", "optimizer first"])
@pytest.mark.parametrize("way", ["move", "map"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_of_an_unmoved_twin(name, way, order):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    both = [model, optimizer]
    tree = tuple(both[at] for at in order)
    new = to_cpu(copy=True)(tree) if way == "move" else fmap(lambda x: x.clone(), tree)
    new_model, new_optimizer = (new[order.index(at)] for at in (0, 1))
    assert type(new_optimizer) is type(optimizer)
    before = copy.deepcopy(model.state_dict())
    train(new_model, new_optimizer, start=3)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    train(model, optimizer, start=3)
    assert_equal_but_apart(new_model, model)
    old_state, new_state = optimizer.state_dict(), new_optimizer.state_dict()
    assert old_state["state"].keys() == new_state["state"].keys()
    assert old_state["param_groups"] == new_state["param_groups"]
    for number, entries in old_state["state"].items():
        assert list(entries) == list(new_state["state"][number])
    inside = set(map(id, new_model.parameters()))
    assert all(id(key) in inside for key in new_optimizer.state)
    assert all(id(p) in inside for g in new_optimizer.param_groups for p in g["params"])


def test_sparse_adam():
    torch.manual_seed(0)
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.tensor([1, 3])).sum().backward()
        optimizer.step()

    step(model, optimizer)
    new_model, new_optimizer = to_cpu(copy=True)((model, optimizer))
    step(model, optimizer)
    step(new_model, new_optimizer)
    assert_equal_but_apart(new_model, model)


def test_a_cast_spares_the_counter_of_steps(pair):
    model, optimizer = to_torch(dtype="float16")(pair)
    state = optimizer.state[model[0].weight]
    kinds = {name: value.dtype for name, value in state.items()}
    half = torch.float16
    assert kinds == {"step": torch.float32, "exp_avg": half, "exp_avg_sq": half}
    assert state["step"] is not pair[1].state[pair[0][0].weight]["step"]


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_the_counter_goes_along_where_the_optimizer_runs_on_the_device(pair, flag):
    model, optimizer = pair
    for on_device, kind in ((False, "cpu"), (True, "meta")):
        optimizer.param_groups[0][flag] = on_device
        new_model, new_optimizer = fmapper.to_device("meta", dtype="float16")((model, optimizer))
        state = new_optimizer.state[new_model[0].weight]
        assert (state["step"].device.type, state["step"].dtype) == (kind, torch.float32)
        assert (state["exp_avg"].device.type, state["exp_avg"].dtype) == ("meta", torch.float16)


def test_an_optimizer_alone_would_leave_its_model(pair):
    model, optimizer = pair
    for tree in (optimizer, {"o": optimizer}, [optimizer, model[2]]):
        with pytest.raises(fmapper.MoveError, match=r"AdamW .*params\[0\]\[0\].*\(model, opt"):
            to_cpu(tree)
    plan = fmapper.plan(to_cpu, optimizer)
    assert [leaf.action for leaf in plan.refused] == ["refused"]
    alone = to_cpu(strict=False, copy=True)(optimizer)
    assert alone.param_groups[0]["params"][0] is not model[0].weight
    by_hand = to_cpu(copy=True)((optimizer, list(model.parameters())))
    assert by_hand[0].param_groups[0]["params"][0] is by_hand[1][0]


@pytest.mark.gpu("torch")
@pytest.mark.parametrize("name", ["momentum", "AdamW", "Adam fused"])
def test_on_a_gpu_it_goes_on_as_with_load_state_dict(name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    twin = copy.deepcopy(model).to("cuda")
    twin_optimizer = OPTIMIZERS[name](twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    new_optimizer, new_model = fmapper.to_device("cuda")((optimizer, model))
    devices = [
        {key: entry.device for key, entry in one.state[parameters].items() if entry is not None}
        for one, parameters in (
            (new_optimizer, new_model[0].weight),
            (twin_optimizer, twin[0].weight),
        )
    ]
    assert devices[0] == devices[1]
    train(new_model, new_optimizer, start=3)
    train(twin, twin_optimizer, start=3)
    assert_equal_but_apart(new_model, twin)


def test_a_cache_carries_the_model_over_to_a_second_call(pair):
    model, optimizer = pair
    cache = {}
    mover = to_cpu(copy=True)
    new_model = fmap(mover, model, cache=cache)
    new_optimizer = fmap(mover, optimizer, cache=cache)
    train(new_model, new_optimizer, start=3)
    train(model, optimizer, start=3)
    assert_equal_but_apart(new_model, model)


def test_several_optimizers_and_a_trainer_around_them(pair):
    @fmapper.functor
    class Trainer:
        def __init__(self, model):
            self.optimizers = {
                "low": optim.SGD([model[0].weight, model[0].bias], lr=0.1, momentum=0.9),
                "high": optim.Adam([{"params": [p], "lr": 0.1} for p in model[2].parameters()]),
            }
            self.model = model

    trainer = Trainer(pair[0])
    new = to_cpu(copy=True)(trainer)
    for one in (trainer, new):
        for optimizer in one.optimizers.values():
            train(one.model, optimizer)
    assert_equal_but_apart(new.model, trainer.model)
    assert [group["lr"] for group in new.optimizers["high"].param_groups] == [0.1, 0.1]


def test_hooks_are_kept_and_not_shared(pair):
    model, optimizer = pair
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    new_model, new_optimizer = to_cpu(copy=True)(pair)
    new_optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 1)
    assert calls == ["pre"]
    train(new_model, new_optimizer, 1)
    assert calls == ["pre", "pre", "post"]


def test_a_state_without_its_parameter_in_a_group_goes_along(pair):
    model, optimizer = pair
    last = optimizer.param_groups[0]["params"].pop()
    new_model, new_optimizer = to_cpu(copy=True)((model, optimizer))
    assert last in optimizer.state
    assert new_model[2].bias in new_optimizer.state


def test_a_wrapper_shares_its_tables_with_what_it_wraps(pair):
    class Lookahead(optim.Optimizer):
        def __init__(self, base):
            self.base = base
            super().__init__(base.param_groups, {})
            self.param_groups = base.param_groups

        def step(self, closure=None):
            return self.base.step(closure)

    model, optimizer = pair
    new_model, new = to_cpu(copy=True)((model, Lookahead(optimizer)))
    assert new.param_groups is new.base.param_groups
    assert new.base is not optimizer
    train(new_model, new, start=3)
    train(model, optimizer, start=3)
    assert_equal_but_apart(new_model, model)


SCHEDULERS = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.5)],
        [2],
    ),
    "ChainedScheduler": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


def advance(model, optimizer, scheduler, epochs, start=0):
    rates = []
    for epoch in range(start, start + epochs):
        train(model, optimizer, 1, start=epoch)
        loss = (1.0,) if isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("epochs", [0, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_with_the_new_optimizer(name, epochs):
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    scheduler = SCHEDULERS[name](optimizer)
    advance(model, optimizer, scheduler, epochs)
    new_scheduler, new_model, new_optimizer = to_cpu(copy=True)((scheduler, model, optimizer))
    assert new_scheduler.optimizer is new_optimizer
    assert new_scheduler.state_dict().keys() == scheduler.state_dict().keys()
    new_rates = advance(new_model, new_optimizer, new_scheduler, 4, start=epochs)
    assert optimizer.param_groups[0]["lr"] != new_rates[-1] or name == "CyclicLR"
    assert advance(model, optimizer, scheduler, 4, start=epochs) == new_rates
    assert_equal_but_apart(new_model, model)


def test_a_scheduler_warns_of_the_order_as_before():
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    _, new_optimizer, new_scheduler = to_cpu(copy=True)((model, optimizer, scheduler))
    new_scheduler.step()  # no warning: the step is known to have been made
    del optimizer, scheduler
    new_optimizer.step()
    fresh = optim.SGD(model.parameters(), lr=0.1)
    _, other, late = to_cpu(copy=True)((model, fresh, optim.lr_scheduler.StepLR(fresh, 2)))
    assert not hasattr(other, "_opt_called")
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        late.step()


def test_an_averaged_model_and_its_schedule():
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    averaged = optim.swa_utils.AveragedModel(model)
    schedule = optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    tree = {"m": model, "o": optimizer, "a": averaged, "s": schedule}
    new = to_cpu(copy=True)(tree)
    for one in (tree, new):
        for epoch in range(3):
            train(one["m"], one["o"], 1, start=epoch)
            one["a"].update_parameters(one["m"])
            one["s"].step()
    assert_equal_but_apart(new["a"], averaged)
    assert new["a"].n_averaged == averaged.n_averaged == 3
    assert new["o"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_scaler_keeps_its_scale_in_float32(pair):
    model, _ = pair
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    new = to_torch(dtype="float16")(scaler)
    assert new._scale.dtype == torch.float32
    assert new.state_dict() == scaler.state_dict()
    scaler.unscale_(optimizer)
    with pytest.raises(fmapper.RebuildError, match="middle of a step"):
        to_cpu(scaler)
    scaler.step(optimizer)
    scaler.update()
    to_cpu(scaler)


# --- in place -----------------------------------------------------------------------------------


def test_in_place_parameters_and_optimizer_stay_the_same_objects(pair):
    model, optimizer = pair
    twin = fmap(lambda x: x.double(), pair)
    objects = [*map(id, model.parameters()), id(optimizer.param_groups[0]["params"][0])]
    assert move_(pair, to_cpu(dtype="float64")) is pair
    assert [*map(id, model.parameters())] == objects[:-1]
    assert id(optimizer.param_groups[0]["params"][0]) == objects[-1]
    assert model[0].weight.grad.dtype == torch.float64
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float64
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float32
    twin[1].state[twin[0][0].weight]["step"] = optimizer.state[model[0].weight]["step"].clone()
    train(model, optimizer, start=3)
    assert all(p.dtype == torch.float64 for p in twin[0].parameters())


def test_in_place_is_all_or_nothing(pair):
    model, _ = pair
    with torch.no_grad():
        model[2].bias[0] = 1e30
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(fmapper.LossyCastError, match=r"\[2\]\.bias"):
        move_(pair, to_cpu(dtype="float16"))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


def test_in_place_is_undone_if_a_node_refuses(pair):
    class Stubborn(list):
        def __setitem__(self, key, value):
            raise RuntimeError("no")

    model, optimizer = pair
    before = model[0].weight.detach().clone()
    pointer = model[0].weight.data_ptr()
    average = optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(RuntimeError, match="no"):
        move_([model, optimizer, Stubborn([torch.ones(1)])], to_cpu(dtype="float64"))
    assert model[0].weight.data_ptr() == pointer
    assert torch.equal(model[0].weight, before)
    assert optimizer.state[model[0].weight]["exp_avg"] is average


def test_in_place_an_optimizer_alone_is_refused_and_what_is_no_mover_too(pair):
    with pytest.raises(fmapper.MoveError, match="AdamW"):
        move_(pair[1], to_cpu)
    with pytest.raises(TypeError, match="mover"):
        move_(pair[0], torch.clone)


def test_in_place_what_torch_replaces_is_replaced_everywhere(pair):
    model, optimizer = pair
    old = model[0].weight
    move_(pair, fmapper.to_device("meta"))
    assert model[0].weight is not old
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert next(iter(optimizer.state)) is model[0].weight


def test_in_place_buffers_attributes_and_containers():
    model = nn.BatchNorm1d(2)
    model.extra = {"table": torch.ones(2)}
    model.pair = (torch.ones(1), 2)
    table, running = model.extra, model.running_mean
    assert move_(model, to_cpu(dtype="float64")) is model
    assert model.extra is table
    assert table["table"].dtype == model.pair[0].dtype == torch.float64
    assert model.running_mean is not running
    assert model.running_mean.dtype == torch.float64


def test_in_place_with_the_swap_of_torch():
    model = nn.Linear(2, 2)
    weight = model.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        move_(model, to_cpu(dtype="float64"))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight is weight
    assert weight.dtype == torch.float64


def test_move_in_place_is_as_deep_as_the_tree():
    weight = torch.nn.Parameter(torch.ones(2))
    tree = [weight]
    for _ in range(5000):
        tree = [tree]
    assert move_(tree, to_cpu(dtype="float64")) is tree
    assert weight.dtype == torch.float64
