"""Layers of torch.nn in JAX: values, delicate gradients, and what training changes."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import fmapper  # noqa: E402
from models import nn_cases  # noqa: E402
from support import converting  # noqa: E402

nn, F = torch.nn, torch.nn.functional

# A tenth of the cases; `nox -s nightly` runs all of them, and `nox -s layers` with a report.
NAMES = [
    name if index % 10 == 0 else pytest.param(name, marks=pytest.mark.nightly)
    for index, name in enumerate(nn_cases.CASES)
]


@pytest.mark.sampled(28)
@pytest.mark.nightly_cases(
    "FractionalMaxPool3d: kernel_size=2, output_size=(3, 3, 3), _random_samples=[[]2, 3, 3]",
    "TransformerDecoderLayer: d_model=8, nhead=2, dim_feedforward=12",
    "CTCLoss: reduction='mean''",
    "CTCLoss: reduction='sum'",
)
@pytest.mark.filterwarnings("ignore")  # torch's: deprecations, and shapes that broadcast
@pytest.mark.parametrize("name", NAMES)
def test_layers(name):
    make, inputs = nn_cases.CASES[name]
    converting.check(nn_cases.build(make), *inputs)


# --- gradients ----------------------------------------------------------------------------------


def both_gradients(function, *inputs):
    """Of the sum of the outputs, each times another number, by all inputs: of JAX and of torch."""
    tensors = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    module = converting.Function(function)
    converted = fmapper.convert(module, "jax", tuple(inputs))
    output = function(*tensors)
    weights = torch.arange(1.0, output.numel() + 1).reshape(output.shape) / output.numel()
    (output * weights).sum().backward()
    floating = [i for i, x in enumerate(tensors) if x.requires_grad]
    arrays = [fmapper.to_jax(x.detach()) for x in inputs]

    def loss(*chosen):
        given = list(arrays)
        for i, array in zip(floating, chosen, strict=True):
            given[i] = array
        return (converted(*given) * weights.numpy()).sum()

    found = jax.grad(loss, argnums=tuple(range(len(floating))))(*[arrays[i] for i in floating])
    return found, [tensors[i].grad for i in floating]


def assert_same_gradients(function, *inputs):
    for got, want in zip(*both_gradients(function, *inputs), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)


ACTIVATIONS = """elu celu selu mish hardswish hardsigmoid hardtanh relu relu6 leaky_relu softplus
softshrink hardshrink logsigmoid silu gelu"""
EDGES = torch.tensor([-6.0, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 25])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    ACTIVATIONS.split(),
)
def test_gradients_of_activations_at_their_edges(name):
    assert_same_gradients(getattr(F, name), EDGES)


@pytest.mark.parametrize(
    "name", ["relu", "relu6", "hardtanh", "leaky_relu", "elu", "silu", "hardswish"]
)
def test_zeros_keep_their_sign(name):
    x = torch.tensor([0.0, -0.0, -1.0, -0.0])
    function = getattr(F, name)
    options = {"min_val": 0.0} if name == "hardtanh" else {}
    converting.check(lambda x: function(x, **options).signbit() & (x == 0), x)


@pytest.mark.nightly
@pytest.mark.parametrize("function", [F.smooth_l1_loss, F.huber_loss])
def test_infinite_differences_have_the_slope_of_large_ones(function):
    x = torch.tensor([1.0, float("inf"), 2.5, -float("inf")])
    assert_same_gradients(lambda x, y: function(x, y, reduction="none")[1:], x, torch.ones(4))


@pytest.mark.nightly
def test_large_inputs_have_finite_gradients():
    large = torch.tensor([-1e4, 1e4])
    for function in (F.elu, F.softplus, F.mish):
        assert_same_gradients(function, large)


@pytest.mark.nightly
def test_gradients_of_attention_with_rows_that_see_nothing():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[0] = False
    assert_same_gradients(lambda *a: F.scaled_dot_product_attention(*a, attn_mask=mask), q, k, v)


@pytest.mark.nightly_cases("celu", "elu")
@pytest.mark.parametrize("function", [F.elu, F.celu, F.selu])
def test_small_gradients_of_exponential_units_are_not_lost(function):
    assert_same_gradients(function, torch.tensor([-15.0]))
    assert_same_gradients(function, torch.tensor([-30.0]))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_have_the_dtype_of_the_array(kind):
    def normalised(x, by):
        layers = torch.ops.aten.native_layer_norm(x, [3], by[:3], by[:3], 1e-5)
        return layers, torch.ops.aten.native_group_norm(x, by, by, 2, 4, 3, 2, 1e-5)

    converting.check(normalised, torch.randn(2, 4, 3).to(kind), torch.ones(4).to(kind))


@pytest.mark.parametrize("kinds", [(torch.int32, torch.int32), (torch.int32, torch.int64)])
def test_bags_are_counted_in_the_dtype_of_their_indices(kinds):
    ids, offsets = torch.tensor([0, 2, 1]).to(kinds[0]), torch.tensor([0, 1]).to(kinds[1])
    bag = torch.ops.aten._embedding_bag
    converting.check(lambda i, o, w: bag(w, i, o, False, 2), ids, offsets, torch.randn(4, 3))


def test_an_empty_table_has_no_rows_to_look_up():
    ids = torch.zeros(0, 4, dtype=torch.int64)
    converting.check(lambda i, w: (F.embedding(i, w), w.take(i)), ids, torch.zeros(0, 3))


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.uint8, torch.complex64])
def test_attention_over_nothing_takes_all_dtypes(kind):
    q, k = torch.ones(2, 3, 4).to(kind), torch.ones(2, 0, 4).to(kind)
    nothing = torch.zeros(0, 3).to(kind)
    attention = F.scaled_dot_product_attention
    converting.check(lambda q, k, x: (attention(q, k, k), attention(x, x, x)), q, k, nothing)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_of_recurrent_networks(kind):
    network = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True)
    assert_same_gradients(lambda x: network(x)[0], torch.randn(5, 2, 3))


LOSSES = {
    "smooth_l1": (F.smooth_l1_loss, EDGES, torch.zeros(10)),
    "huber": (F.huber_loss, EDGES, torch.zeros(10)),
    "binary_cross_entropy": (
        F.binary_cross_entropy,
        torch.tensor([0.1, 0.5, 0.9]),
        torch.tensor([0.0, 0.2, 1.0]),
    ),
    "cross_entropy": (F.cross_entropy, torch.randn(4, 5), torch.tensor([0, 4, -100, 2])),
    "multi_margin": (F.multi_margin_loss, torch.randn(4, 5), torch.tensor([0, 4, 1, 2])),
    "multilabel_margin": (
        F.multilabel_margin_loss,
        torch.randn(2, 5),
        torch.tensor([[3, 0, -1, 1, 2], [1, 2, 3, 4, 0]]),
    ),
    "ctc": (
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, (12, 9), (4, 2)),
        torch.randn(12, 2, 6),
        torch.tensor([[1, 1, 3, 4], [2, 5, 1, 1]]),
    ),
    "ctc of logarithms": (
        lambda x, y: F.ctc_loss(x, y, (12, 9), (4, 2), reduction="none"),
        torch.randn(12, 2, 6).log_softmax(-1),
        torch.tensor([[1, 1, 3, 4], [2, 5, 1, 1]]),
    ),
    "ctc, too short": (
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, (3, 9), (4, 2), zero_infinity=True),
        torch.randn(12, 2, 6),
        torch.tensor([[1, 1, 3, 4], [2, 5, 1, 1]]),
    ),
}


@pytest.mark.daily_cases("huber", "binary_cross_entropy", "multi_margin")
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses(name):
    assert_same_gradients(*LOSSES[name])


@pytest.mark.nightly
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_in_chunks(reduction, weighted):
    chunks = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 5)

        def forward(self, x, y):
            return F.linear_cross_entropy(
                x,
                self.last.weight,
                y,
                linear_bias=self.last.bias,
                weight=torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0]) if weighted else None,
                reduction=reduction,
                ignore_index=2,
                options=chunks.LinearCrossEntropyOptions(batch_chunk_size=2),
            )

    module, x, y = Loss(), torch.randn(7, 3), torch.tensor([0, 1, 2, 3, 4, 2, 1])
    model = converting.check(module, x, y)
    assert any("linear_cross_entropy" in op for op in model.program.ops())
    module(x, y).sum().backward()
    arrays = (x.numpy(), y.numpy())
    got = jax.grad(lambda params: model.replace(params=params)(*arrays).sum())(model.params)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(got[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_batch_normalisation_with_update():
    update = torch.ops.aten._batch_norm_with_update_functional
    mean, var = torch.randn(3), torch.rand(3)
    inputs = (torch.randn(2, 3, 4), torch.randn(3), torch.randn(3), mean, var)
    converting.check(lambda *given: update(*given, 0.1, 1e-5), *inputs)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_embedding_bags(mode):
    indices, offsets = torch.tensor([1, 3, 3, 0, 2]), torch.tensor([0, 3, 3])
    assert_same_gradients(
        lambda w: F.embedding_bag(indices, w, offsets, mode=mode), torch.randn(5, 3)
    )


# --- training -----------------------------------------------------------------------------------


@pytest.mark.nightly_cases("batch without weights")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, momentum=0.3, affine=False),
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ],
    ids=["batch", "batch without weights", "instance"],
)
def test_running_statistics_move_as_in_torch(make):
    module = nn_cases.build(make).train()
    x = 2 * torch.randn(3, 4, 5) + 1
    converted = fmapper.convert(module, "jax", (x,), train=True)
    got, moved = converted(fmapper.to_jax(x), mutable=True)
    want = module(x)
    converting.compare(got, want)
    converting.compare(moved.buffers, dict(module.named_buffers()))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_dropout_between_layers_needs_a_key_only_in_training(kind):
    network = getattr(nn, kind)(3, 4, num_layers=3, dropout=0.5)
    x = torch.ones(5, 2, 3)
    converting.check(network, x)
    converted = fmapper.convert(network, "jax", (x,), train=True)
    array = fmapper.to_jax(x)
    with pytest.raises(fmapper.ProgramInputError, match="key"):
        converted(array)
    one, same, other = (converted(array, key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.nightly
def test_dropout_of_attention_keeps_the_mean():
    q, k, v = torch.zeros(1, 1, 50, 4), torch.zeros(1, 1, 200, 4), torch.ones(1, 1, 200, 4)
    model = converting.Function(lambda *a: F.scaled_dot_product_attention(*a, dropout_p=0.25))
    converted = fmapper.convert(model, "jax", (q, k, v))
    out = converted(*map(fmapper.to_jax, (q, k, v)), key=jax.random.key(0))
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.05


@pytest.mark.nightly
def test_packed_sequences():
    from fmapper_adapters.jax.aten.layers import recurrent

    for kind in ("LSTM", "GRU"):
        network = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True)
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 3), torch.tensor([5, 3, 1]))
        with torch.no_grad():
            want, states = network(packed)
        zeros = fmapper.to_jax(torch.zeros(4, 3, 4))
        weights = [fmapper.to_jax(w.detach()) for w in network._flat_weights]
        run = recurrent.lstm_packed if kind == "LSTM" else recurrent.gru_packed
        start = (zeros, zeros) if kind == "LSTM" else zeros
        data, sizes = (fmapper.to_jax(x) for x in (packed.data, packed.batch_sizes))
        got, *ends = run(data, sizes, start, weights, True, 2, 0.0, False, True)
        converting.compare(got, want.data)
        converting.compare(ends, list(states) if kind == "LSTM" else [states])


@pytest.mark.nightly
def test_batch_norm_with_the_averages_of_all_batches() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=None), torch.nn.Linear(3, 2))
    model = fmapper.convert(module, "jax", (torch.randn(8, 3),), train=True)
    module.train()
    for _ in range(3):
        x = torch.randn(8, 3) * 3 + 1
        y, model = model(x.numpy(), mutable=True)
        converting.compare(y, module(x))
    for name, buffer in module.named_buffers():
        converting.compare(model.buffers[name], buffer)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoders_with_padding() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with pytest.warns(fmapper.ConversionWarning, match="padded positions"):
        model = fmapper.convert(module, "jax", (x,), {"src_key_padding_mask": padding})
    got = model(x.numpy(), src_key_padding_mask=padding.numpy())
    converting.compare(got, module(x, src_key_padding_mask=padding))
    with torch.no_grad():  # torch has other kernels then, with zeros in the padding
        fast = module(x, src_key_padding_mask=padding)
    converting.compare(np.asarray(got)[1, :2], fast[1, :2])
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.nightly
def test_attention_with_functions_of_the_places():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.far = nn.Parameter(torch.randn(4, 31))

        def forward(self, q, k, v):
            def near(score, batch, head, i, j):
                return torch.tanh(score + self.far[head, i - j + 15]) * 2

            def window(batch, head, i, j):
                return (i >= j) & (i - j < 5) & (i > 1)

            blocks = flex.create_block_mask(window, None, None, 16, 16, device="cpu")
            plain = flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
            return plain, flex.flex_attention(q, k, v, near, blocks, 0.3, True)

    module = Net().requires_grad_(False)
    q, k, v = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    model = converting.check(module, q, k, v)
    bias = torch.randn(16, 8)

    def loss(params):
        given = (fmapper.to_jax(x) for x in (q, k, v))
        return (model.replace(params=params)(*given)[1] * bias.numpy()).sum()

    def wanted(far):  # as its definition has it
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        i, j = torch.arange(16)[:, None], torch.arange(16)
        scores = torch.tanh(q @ keys.mT * 0.3 + far[:, i - j + 15]) * 2
        hidden = ~((i >= j) & (i - j < 5))
        found = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        return (found[:, :, 2:] * bias[2:]).sum()

    want = torch.func.grad(wanted)(module.far)
    converting.compare(jax.grad(loss)(model.params)["far"], want)


class Packed(nn.Module):
    """A network over packed sequences, with dropout on what is packed."""

    def __init__(self, kind, **options):
        super().__init__()
        self.network = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, **options)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, lengths, total):
        rnn = nn.utils.rnn
        first = self.network.batch_first
        options = {"batch_first": first, "enforce_sorted": False}
        packed = rnn.pack_padded_sequence(x, lengths, **options)
        packed = packed._replace(data=self.drop(packed.data))
        found, states = self.network(packed)
        assert isinstance(found, rnn.PackedSequence)
        options = {"batch_first": first, "padding_value": -1.0, "total_length": total}
        return rnn.pad_packed_sequence(found, **options), states


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_of_any_lengths(kind):
    module = Packed(kind, batch_first=kind != "RNN", dropout=0.5).eval()
    x, lengths = torch.randn(3, 5, 3), torch.tensor([2, 5, 1])
    x = x.transpose(0, 1) if kind == "RNN" else x
    for total in None, 7:
        model = converting.check(module, x, lengths, total, options={"dynamic_shapes": "auto"})
        jitted = jax.jit(lambda x, lengths, model=model, total=total: model(x, lengths, total))
        others = torch.tensor([5, 3, 4])
        want = module(x, others, total)
        converting.compare(jitted(fmapper.to_jax(x), fmapper.to_jax(others)), want)
    converting.check_gradients(lambda x: module(x, lengths, 5), x)

    shorter = fmapper.to_jax(torch.tensor([2, 4, 1]))
    model = fmapper.convert(module, "jax", (x, lengths, None))
    with pytest.raises(fmapper.ProgramInputError, match="total_length"):
        model(fmapper.to_jax(x), shorter, None)
    trained = fmapper.convert(module, "jax", (x, lengths, None), train=True)
    with pytest.raises(fmapper.ProgramInputError, match="key"):
        trained(fmapper.to_jax(x), fmapper.to_jax(lengths), None)
    trained(fmapper.to_jax(x), fmapper.to_jax(lengths), None, key=jax.random.key(0))


@pytest.mark.parametrize("name", ["mean", "cat", "where"])
def test_data_of_packed_sequences_are_not_read(name):
    def read(x, lengths):
        data = nn.utils.rnn.pack_padded_sequence(x, lengths).data
        if name == "mean":
            return data.mean()
        if name == "cat":
            return torch.cat([x[0], data])
        return torch.where(torch.tensor(True), 0.0, data)

    given = (torch.randn(4, 2, 3), torch.tensor([4, 2]))
    with pytest.raises(fmapper.ConversionError, match=f"{name} reads the data of a PackedSequence"):
        fmapper.convert(converting.Function(read), "jax", given)


@pytest.mark.parametrize("target", [[2], 2])
def test_the_loss_of_one_row_has_the_shape_of_its_target(target):
    x = torch.randn(5)
    converting.check(lambda x: F.multi_margin_loss(x, torch.tensor(target), reduction="none"), x)


@pytest.mark.nightly
def test_the_mask_of_the_plain_kernel_says_what_dropout_keeps():
    """Its lowering is called for programs that have the kernel whole: `convert` decomposes it."""
    from fmapper_adapters.jax.aten.layers.attention import attention_math

    q, keep = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 3, 3) > 0.4
    want = torch.ops.aten._scaled_dot_product_attention_math(q, q, q, None, 0.5, False, keep)
    got = attention_math(*(jax.numpy.asarray(q.numpy()),) * 3, None, 0.5, False, keep.numpy())
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
