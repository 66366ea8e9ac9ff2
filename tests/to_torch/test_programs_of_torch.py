"""Programs that were recorded from torch, and go back to torch: from a file, or from a JaxModel."""

import dataclasses

import pytest

import fmapper
from fmapper.programs import Call, Graph, Ref

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

nn = torch.nn


def there_and_back(module, args, tmp_path, *, train=False, **options):
    """The module after torch -> JAX -> file -> torch."""
    model = fmapper.convert(module, "jax", args, train=train, **options)
    path = tmp_path / "model.safetensors"
    model.save(path)
    found = fmapper.convert(fmapper.load_program(path), "torch")
    return found.train(train)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.table = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)).transpose(0, 1).contiguous().view(-1, 16))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(5, 7, 2, bidirectional=True), nn.GRU(14, 3)

    def forward(self, x):
        y, (h, _) = self.lstm(x)
        return self.gru(y)[0], h


class Halves(nn.Module):
    def forward(self, x, n):
        y = x.to(torch.bfloat16) * 2 + torch.arange(4, dtype=torch.bfloat16)
        words = n.to(torch.uint32)
        return y.float().cumsum(1), words, torch.full((2,), 3.0), y.argmax(1), x.view(torch.int32)


MODULES = {
    "attention": (Attention, lambda: (torch.randint(11, (2, 6)),)),
    "recurrent": (Recurrent, lambda: (torch.randn(4, 2, 5),)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ),
        lambda: (torch.randn(2, 3, 17, 19),),
    ),
    "dtypes": (Halves, lambda: (torch.randn(3, 4), torch.tensor([1, 5]))),
}  # fmt: skip


@pytest.mark.nightly_cases("convolutions", "recurrent", "attention")
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_are_those_of_the_module(name, tmp_path):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, args = make().eval(), inputs()
    model = there_and_back(module, args, tmp_path)
    assert set(model.state_dict()) == set(module.state_dict())
    got, want = model(*args), module(*args)
    same(got, want)
    if not list(module.parameters()):
        return
    for one in (got, want):
        first = one[0] if isinstance(one, tuple) else one
        first.square().sum().backward()
    own = dict(model.named_parameters())
    for path, parameter in module.named_parameters():
        same(own[path].grad, parameter.grad)


@pytest.mark.nightly
def test_sizes_vary(tmp_path):
    module = Attention().eval()
    length = torch.export.Dim("length", min=2)
    model = there_and_back(
        module, (torch.randint(11, (2, 6)),), tmp_path, dynamic_shapes={"ids": {1: length}}
    )
    for n in (6, 2, 9):
        ids = torch.randint(11, (2, n))
        same(model(ids), module(ids))
    with pytest.raises(fmapper.ProgramInputError, match="ids"):
        model(torch.zeros(3, 6, dtype=torch.int64))


def test_training_has_batch_statistics_and_other_numbers_each_time(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    x = torch.randn(16, 4)
    model = there_and_back(module, (x,), tmp_path, train=True)
    start = module.state_dict()
    model.load_state_dict(start)
    torch.manual_seed(1)
    got = model(x)
    torch.manual_seed(1)
    same(got, module(x))
    same(model.state_dict()["1.running_mean"], module.state_dict()["1.running_mean"])
    assert not torch.equal(model(x), got)


class Twice(nn.Module):
    def forward(self, x):
        return x + torch.rand(3) - torch.rand(3)


def test_numbers_that_are_drawn_twice_are_not_drawn_once(tmp_path):
    model = there_and_back(Twice(), (torch.zeros(3),), tmp_path, check=False)
    first, second = model(torch.zeros(3)), model(torch.zeros(3))
    assert first.any()
    assert not torch.equal(first, second)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 30 * x  # not the derivative: so it is seen which one is taken


class Parts(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().amax()
        positive = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos() * 2, (x,))
        return Cube.apply(x) / scale + positive


@pytest.mark.nightly
def test_branches_no_grad_and_derivatives_of_ones_own(tmp_path):
    module = Parts()
    x = torch.randn(5)
    model = there_and_back(module, (x,), tmp_path)
    for sign in (1, -1):
        gradients = []
        for one in (module, model):
            given = (sign * x.abs()).requires_grad_()
            result = one(given)
            gradients.append(torch.autograd.grad(result.sum(), given)[0])
            same(result, module(given))
        same(*gradients)


class Writes(nn.Module):
    def forward(self, cache, x):
        cache[1] = x
        return cache.sum(0)


def test_an_input_that_is_written_to_is_written_to(tmp_path):
    model = there_and_back(Writes(), (torch.zeros(3, 2), torch.ones(2)), tmp_path)
    cache = torch.zeros(3, 2)
    same(model(cache, torch.full((2,), 4.0)), torch.full((2,), 4.0))
    same(cache[1], torch.full((2,), 4.0))


class Masked(nn.Module):
    def forward(self, x, mask):
        torch._assert_async((x > 0).all(), "x is to be positive")
        return x[mask].sum()


@pytest.mark.nightly
def test_what_the_values_decide_is_decided_anew_and_what_is_asserted_is(tmp_path):
    x, mask = torch.rand(4) + 1, torch.tensor([True, False, True, True])
    model = there_and_back(Masked(), (x, mask), tmp_path, specialize=True)
    for one in (mask, ~mask, mask & ~mask):
        torch.testing.assert_close(model(x, one), x[one].sum())
    with pytest.raises(RuntimeError, match="x is to be positive"):
        model(-x, mask)


@pytest.mark.nightly
def test_it_compiles_and_takes_other_dtypes(tmp_path):
    module = Attention().eval()
    ids = torch.randint(11, (2, 6))
    model = there_and_back(module, (ids,), tmp_path)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(compiled(ids), module(ids))
    half = module.to(torch.bfloat16)
    same(model.to(torch.bfloat16)(ids), half(ids))


def program(op, args=(), kwargs=None):
    """The program of x -> op(*args), with another operation in the place of its own."""
    model = fmapper.convert(nn.ReLU(), "jax", (torch.ones(2, 3),))
    made = model.as_program()
    call = Call("y", op, args, kwargs or {}, result=(("float32", (2, 3)),))
    graph = Graph(made.graph.inputs, [call], (Ref("y"),))
    return dataclasses.replace(made, graph=graph)


X = Ref("input")
HOSTILE = [
    ("aten::from_file.default", ("/etc/hostname", False, 4)),
    ("aten::set_.source_Tensor", (X, X)),
    ("aten::set.source_Tensor", (X, X)),
    ("aten::add_.Tensor", (X, X)),
    ("aten::add.out", (X, X)),
    ("aten::add.str", ("a", "b")),
    ("aten::resize_.default", (X, (1 << 30,))),
    ("aten::data_ptr.default", (X,)),
    ("aten::_test_serialization_subcmul.default", (X, X)),
    ("aten::max_pool2d_with_indices_backward.default", (X, X)),
    ("aten::__class__.default", (X,)),
    ("aten::__init__.default", (X,)),
    ("aten::add.__class__", (X,)),
    ("aten::add._schema", (X,)),
    ("aten::add", (X, X)),
    ("prims::_make_token.default", ()),
    ("quantized::linear.default", (X, X)),
    ("debugprims::load_tensor.default", ("x", (2, 3), (3, 1))),
    ("mylib::open.default", ("x",)),
    ("sym::__import__", ("os",)),
    ("sym::system", ("true",)),
    ("sym::exec", ("1",)),
    ("higher_order::flat_apply", (X,)),
    ("higher_order::print", (X,)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("op", "args"), HOSTILE, ids=[op for op, _ in HOSTILE])
def test_only_what_computes_is_called(op, args):
    with pytest.raises(fmapper.UnsupportedOpsError, match=op.removesuffix(".default")):
        fmapper.convert(program(op, args), "torch")


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("sym::pow", (9, 9**18)), ("sym::lshift", (1, 1 << 60)), ("sym::mul", (1 << 62, 1 << 62)),
        ("aten::relu.default", ("x",)), ("aten::relu.default", (X, X, X)),
        ("aten::as_strided.default", (X, (1 << 20,), (1,), 1 << 20)),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(op, args):
    with pytest.raises((fmapper.ConversionError, RuntimeError)):
        fmapper.convert(program(op, args), "torch")(torch.ones(2, 3))


def test_strings_stay_text():
    hostile = "none'); __import__('os').abort() #\n"
    made = program("aten::gelu.default", (X,), {"approximate": hostile})
    with pytest.raises(fmapper.ConversionError, match="approximate"):
        fmapper.convert(made, "torch")


def test_elements_that_nobody_has_written_are_zeros():
    made = program("aten::empty.memory_format", ((2, 3),))
    same(fmapper.convert(made, "torch")(torch.ones(2, 3)), torch.zeros(2, 3))


# They trust indices among their arguments, or are of a GPU; `_print` writes to the terminal.
LEFT_OUT = {
    "aten::_print",
    "aten::_use_cudnn_ctc_loss",
    "aten::_ctc_loss",
    "aten::ctc_loss",
    "aten::_efficientzerotensor",
    "aten::_thnn_fused_lstm_cell",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices_backward",
    "aten::linalg_ldl_solve",
    "aten::linalg_lu_solve",
    "aten::fractional_max_pool2d",
    "aten::fractional_max_pool3d",
    "aten::segment_reduce",
    "aten::convolution_overrideable",
    "aten::_grid_sampler_2d_cpu_fallback",
    "aten::resize",
    "aten::as_strided_scatter",
}


def test_what_goes_to_jax_goes_back():
    from fmapper_adapters.jax.aten import table
    from fmapper_adapters.torch.aten import calls, names

    table.load()
    calls.TABLE.load()
    there = {key.split(".")[0] for key in table.LOWERINGS if key.startswith("aten::")}
    back = {f"aten::{name}" for name in names.NAMES}
    back |= {key.split(".")[0] for key in calls.TABLE.entries}
    assert there - back == LEFT_OUT - back
    assert not back & LEFT_OUT


def test_users_lowerings_come_first():
    made = program("aten::relu.default", (X,))
    with fmapper_lowering("aten::relu", lambda x: x * 7):
        model = fmapper.convert(made, "torch")
    same(model(torch.ones(2, 3)), torch.full((2, 3), 7.0))


class fmapper_lowering:
    """A lowering of the user's, for a while."""

    def __init__(self, op, function):
        from fmapper.programs import lowering

        self.table = lowering.added.setdefault("torch", {})
        self.op, self.function = op, function

    def __enter__(self):
        fmapper.lowering(self.op, to="torch")(self.function)

    def __exit__(self, *error):
        del self.table[self.op]
