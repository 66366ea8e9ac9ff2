"""What each private name of a framework promises: a release that changes one fails here."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fmapper_adapters.torch import _private  # noqa: E402


def test_every_function_has_a_test():
    functions = {
        name
        for name, value in vars(_private).items()
        if callable(value) and not name.startswith("_") and value.__module__ == _private.__name__
    }
    text = Path(__file__).read_text()
    assert len(functions) > 20
    assert [name for name in functions if f"_private.{name}" not in text] == []


def test_tensors():
    x = torch.arange(6.0)
    assert _private.identity_of(x.untyped_storage()) == _private.identity_of(
        x[1:].untyped_storage()
    )
    assert _private.identity_of(x) != _private.identity_of(x[1:])
    before = _private.version_of(x)
    x.add_(1)
    assert _private.version_of(x) == before + 1
    assert _private.is_view(x[1:])
    assert not _private.is_view(x)
    assert not _private.is_functional(x)
    assert _private.may_take_values_of(x, x.clone())
    made = _private.make_parameter(torch.nn.Parameter, x, False)
    assert type(made) is torch.nn.Parameter
    assert not made.requires_grad
    assert made.data_ptr() == x.data_ptr()
    assert _private.gamma_gradient(torch.ones(2), torch.ones(2)).shape == (2,)
    targets = [torch.zeros(2), torch.zeros(3, 2).T]
    _private.copy_each(targets, [torch.ones(2), torch.arange(6.0).reshape(2, 3)])
    assert [t.tolist() for t in targets] == [[1, 1], [[0, 1, 2], [3, 4, 5]]]


def test_what_a_module_does_not_save():
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left", torch.ones(2), persistent=False)
    module.register_buffer("none", None, persistent=False)
    assert [buffer.shape for buffer in _private.transient_buffers(module)] == [(2,)]


def test_a_class_of_transformers_is_made_in_a_dtype():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    made = _private.make_pretrained_class(transformers.BertModel, config, torch.bfloat16)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32


def test_forks(monkeypatch):
    assert not _private.is_fork_of_user("cuda")
    assert not _private.is_fork_of_user("kind of nobody")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert _private.is_fork_of_user("cuda")
    assert callable(torch.xpu._is_in_bad_fork)


def test_asserting():
    _private.assert_async(torch.tensor(True), "never said")
    with pytest.raises(RuntimeError, match="said"):
        _private.assert_async(torch.tensor(False), "said")


def test_fake_tensors():
    with _private.FakeTensorMode():
        x = torch.ones(2)
    assert isinstance(x, _private.FakeTensor)
    assert _private.get_fakes().FakeTensor is _private.FakeTensor
    assert not _private.is_traceable_wrapper_subclass(torch.ones(2))
    assert issubclass(_private.FunctionalTensor, torch.Tensor)
    assert _private.TracingContext.try_get() is None


def test_functions_that_ask_for_layouts():
    from torch._subclasses import fake_impls

    from fmapper_adapters.torch.record.varying.layouts import FUNCTIONS

    for module, names in FUNCTIONS.items():
        assert all(callable(getattr(getattr(torch, module), name)) for name in names)
    assert "_reshape_view_helper" in fake_impls._view_meta.__code__.co_names
    assert _private.VIEW_RULE[1] in torch._refs._reshape_view_helper.__code__.co_names


def test_sizes_stay_symbols_with_the_python_dispatcher():
    from torch.fx.experimental import symbolic_shapes as shapes

    mode = _private.FakeTensorMode(shape_env=shapes.ShapeEnv())
    context = shapes.StatelessSymbolicContext(dynamic_sizes=[shapes.DimDynamic.DYNAMIC])
    (size,) = mode.from_tensor(torch.ones(5, device="meta"), symbolic_context=context).shape
    with mode, _private.enable_python_dispatcher():
        padded = torch.constant_pad_nd(torch.ones(size), [0, 1], 0)
    assert str(padded.shape[0]) == f"{size} + 1"
    assert not mode.shape_env.replacements


def test_transformations():
    seen = []

    def look(x):
        seen.append((_private.is_in_transformation(), _private.is_wrapped(x)))
        seen.append((_private.count_levels(), _private.is_batched(x)))
        assert not _private.is_wrapped(_private.unwrap(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(3, 2))
    assert seen == [(True, True), (1, True)]
    assert not _private.is_in_transformation()
    assert _private.count_levels() == 0
    assert callable(_private.leave_level)


def test_derivatives_forwards():
    assert not _private.is_dual()
    with torch.autograd.forward_ad.dual_level():
        assert _private.is_dual()
    _private.enter_dual_level()
    with pytest.raises(RuntimeError):
        _private.enter_dual_level()
    _private.exit_dual_level()


def test_hooks_of_saved_tensors():
    assert _private.has_saved_tensors_hooks()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not _private.has_saved_tensors_hooks()
        _private.allow_saved_tensors_hooks()
        assert _private.has_saved_tensors_hooks()


def test_gradients_are_switched_unseen():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        _private.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
        assert not any(map(_private.is_set_grad_enabled, seen))
        torch.set_grad_enabled(True)
    assert any(map(_private.is_set_grad_enabled, seen))


def test_the_engine_can_be_replaced():
    engine = _private.get_engine()
    calls = []
    x = torch.ones(2, requires_grad=True)
    try:
        _private.set_engine(lambda *args, **kwargs: calls.append(1) or engine(*args, **kwargs))
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    finally:
        _private.set_engine(engine)
    assert calls == [1, 1]


def test_modules():
    module = torch.nn.Linear(2, 3)
    x = torch.ones(1, 2)
    torch.testing.assert_close(_private.get_call(module)(x), module(x))
    device, dtype, *_ = _private.parse_to("cpu", torch.float64)
    assert (device, dtype) == (torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match="2D or 3D"):
        _private.check_input_dim(torch.nn.BatchNorm1d(2), torch.ones(1))
    assert issubclass(torch.nn.BatchNorm2d, _private.BatchNorm)
    assert [*_private.parameters_of(module)] == ["weight", "bias"]
    assert not _private.buffer_hooks()
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        assert callable(_private.get_recurrent(name))
    called = []
    module.register_forward_pre_hook(lambda *_: called.append(1))
    assert not any(
        isinstance(hook, _private.WrappedHook) for hook in module._forward_hooks.values()
    )
    _private.get_call(module)(x)
    assert called == [1]


def test_compiled_modules():
    compiled = torch.compile(torch.nn.Linear(2, 3), backend="eager")
    assert isinstance(_private.original_of(compiled), torch.nn.Linear)
    assert _private.original_of(torch.nn.ReLU()) is None
    _private.initialize_compiled(compiled)
    x = torch.ones(1, 2)
    torch.testing.assert_close(compiled(x), compiled._orig_mod(x))
    module = torch.nn.Linear(2, 3)
    module.compile(backend="eager")
    cells = [cell.cell_contents for cell in module._compiled_call_impl.__closure__]
    assert any(map(_private.is_dynamo_context, cells))


def test_schedulers_see_a_step_that_is_noted():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert _private.is_scheduled(optimizer.step)
    _private.note_step(optimizer)
    scheduler.step()  # warns, which is an error here, if no step was seen


def test_encoders_and_decoders_ask_whether_a_mask_is_causal():
    causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    asked = []

    def ask(mask, is_causal=None, size=None):
        asked.append((find(mask, is_causal, size), find(mask * 0, is_causal, size)))
        return asked[-1][0]

    net = torch.nn.Transformer(4, 2, 1, 1, 8, batch_first=True)
    find = _private.replace_causal_check(ask)
    try:
        net(torch.ones(1, 3, 4), torch.ones(1, 3, 4), causal, causal)
    finally:
        _private.replace_causal_check(find)
    assert asked == [(True, False), (True, False)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoders_ask_for_nested_tensors():
    nest, is_aligned = _private.get_nesting()
    asked = []

    def ask(*args, **kwargs):
        asked.append("nest")
        return nest(*args, **kwargs)

    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False, True]])
    try:
        _private.set_nesting(ask, lambda *_: True)
        with torch.no_grad():
            encoder(torch.ones(1, 3, 4), src_key_padding_mask=padding)
    finally:
        _private.set_nesting(nest, is_aligned)
    assert asked == ["nest"]


def test_attention_kernels_are_used_without_gradients():
    kernels = _private.get_attention_kernels()
    used = []

    def watch(name):
        return lambda *args, **kwargs: used.append(name) or kernels[name](*args, **kwargs)

    x = torch.ones(1, 3, 4)
    try:
        _private.set_attention_kernels({name: watch(name) for name in kernels})
        with torch.no_grad():
            torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()(x)
            torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()(x, x, x)
    finally:
        _private.set_attention_kernels(kernels)
    assert used == ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"]
    assert _private.get_attention_kernels() == kernels


def test_parameters_of_wrapper_subclasses():
    module = torch.nn.Linear(2, 2)
    _private.unwrap_parameters(module)  # has none
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_dispatch():
    assert _private.has_kernel("aten::add.Tensor", "CPU")
    assert not _private.has_kernel("aten::add.Tensor", "FPGA")
    assert isinstance(torch.ops.aten.add.Tensor, _private.OpOverload)
    assert torch.ops.aten.reshape.default.has_kernel_for_dispatch_key(_private.COMPOSITE)


def test_schemas():
    schema = _private.schema_of(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.overload_name, schema.is_mutable) == ("aten::add_", "Tensor", True)
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert len(schema.returns) == 1
    assert _private.schema_of(len) is None


def test_support_of_halves():
    for name in ("bf16", "fp16"):
        assert _private.get_support(name)() in (True, False)


def test_marks_of_schedulers():
    def step():
        pass

    _private.mark_scheduled(step)
    assert _private.is_scheduled(step)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's log file
def test_reports_of_draft_export():
    x = torch.ones(2)
    found = torch.export.draft_export(torch.nn.ReLU(), (x,))
    assert _private.report_of(found).failures == []
    assert _private.report_of(torch.export.export(torch.nn.ReLU(), (x,))) is None


def test_nodes_of_torch():
    class Own:
        def __init__(self, x):
            self.x = x

    _private.register_node(
        Own,
        lambda own: ([own.x], None),
        lambda children, _: Own(*children),
        flatten_with_keys_fn=lambda own: ([(_private.pytree.GetAttrKey("x"), own.x)], None),
    )
    try:
        assert _private.pytree.tree_leaves(Own(3)) == [3]
    finally:
        _private.deregister_node(Own)
    assert Own not in _private.pytree.SUPPORTED_NODES


def test_sizes_that_vary():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Two(torch.nn.Module):
        def forward(self, x, *, y):
            return x + y

    found = _private.combine_args(Two(), (1,), {"y": 2})
    assert found == {"x": 1, "y": 2}
    seen = []
    x = torch.ones(2)
    _private.walk_shapes(
        lambda path, leaf, shape: seen.append((leaf is x, shape)), {"x": x}, {"x": {0: 5}}
    )
    assert seen == [(True, {0: 5})]
    before = _private.get_replace_symbol()
    _private.set_replace_symbol(before)
    assert ShapeEnv._set_replacement is before


def test_recordings_follow_constants_and_what_is_written_to_them():
    class Table(torch.nn.Module):
        def forward(self, x):
            table = torch.tensor([[2, 3]])
            first = table[0, :1]
            (count,) = table[:, 1].tolist()
            table[0, 0] = x.sum().long()
            other = torch.tensor([1, 2])
            torch._foreach_add_([other], [x.long()[:2]])  # which returns nothing
            return x * count + first.item() + other.tolist()[0]

    x = torch.ones(4)
    with _private.follow_constants(8):
        module = torch.export.export(Table(), (x,), strict=False).module()
    assert torch.equal(module(2 * x), 2 * x * 3 + 8 + 3)
    with pytest.raises(Exception, match="local_scalar_dense"), torch._subclasses.FakeTensorMode():
        torch.tensor([[2, 3]]).tolist()  # as before


def test_symbols_have_expressions():
    n = torch.export.Dim("n", min=2)
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(3),), dynamic_shapes=({0: n},))
    size = next(iter(exported.graph.nodes)).meta["val"].shape[0]
    assert _private.expression_of(size.node).is_Symbol


def test_control_flow():
    last, ys = _private.scan(
        lambda carry, x: (carry + x, carry * 2), torch.zeros(()), torch.ones(3), dim=0
    )
    assert last == 3
    assert ys.tolist() == [0, 2, 4]
    (found,) = _private.while_loop(lambda i: i < 4, lambda i: (i + 1,), (torch.tensor(0),))
    assert found == 4


def test_slots_of_flax():
    jax = pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    from flax.core import FrozenDict

    from fmapper_adapters.flax import _private as private

    frozen = FrozenDict({"b": 1, "a": 2})
    assert list(private.frozen_slots(frozen).items()) == [("b", 1), ("a", 2)]
    hash(frozen)
    assert getattr(frozen, private.FROZEN_HASH) == hash(frozen)

    value = jax.numpy.ones(2)
    variable = nnx.Param(value, note="x")
    assert object.__getattribute__(variable, private.value_slot(nnx.Variable)) is value
    assert object.__getattribute__(variable, private.VARIABLE_METADATA)["note"] == "x"
    assert object.__getattribute__(variable, private.TRACE_STATE).is_valid()

    class Plain(nnx.Module, pytree=False):
        pass

    assert private.is_pytree(nnx.Linear)
    assert not private.is_pytree(Plain)
    assert private.has_int_keys(nnx.List)
    assert not private.has_int_keys(nnx.Linear)


def test_kinds_of_keys_of_jax():
    jax = pytest.importorskip("jax")
    from fmapper_adapters.jax import _private as private

    kind = private.key_kind(jax.random.key(0).dtype)
    assert kind.name == "threefry2x32"
    assert kind.key_shape == (2,)
    sizes = []
    jax.vmap(lambda x: sizes.append(private.size_of_axis("rows")) or x, axis_name="rows")(
        jax.numpy.ones(3)
    )
    assert sizes == [3]


def test_host_memory_that_jax_takes_over():
    jax = pytest.importorskip("jax")
    import numpy as np

    from fmapper_adapters.jax import _private as private

    device = jax.devices("cpu")[0]
    memory = np.zeros(64 + 4 * 256, np.uint8)
    start = -memory.ctypes.data % 64
    aligned = memory[start : start + 4 * 256].view("float32").reshape(16, 16)
    arrays = [aligned, aligned.T, np.ones((), "int32"), np.ones((0, 3), bool)]
    for committed in (False, True):
        with jax.transfer_guard("disallow"):
            made = private.put(arrays, device, committed=committed)
        usual = jax.device_put(arrays, device if committed else None)
        for new, old, array in zip(made, usual, arrays, strict=True):
            assert (new.aval, new.sharding, new.committed) == (old.aval, old.sharding, committed)
            np.testing.assert_array_equal(new, array)
        assert made[0].unsafe_buffer_pointer() == aligned.ctypes.data


def test_messages_of_jax_by_its_coordinator():
    """Between processes `support/jaxes_sync.py` sends them."""
    jax = pytest.importorskip("jax")
    from fmapper_adapters.jax import _private as private

    assert private.coordinator() is None  # in a single process
    errors = iter(["DEADLINE_EXCEEDED: not yet", "", "UNAVAILABLE: gone"])

    class Client:
        def blocking_key_value_get_bytes(self, key, milliseconds):
            if error := next(errors):
                raise jax.errors.JaxRuntimeError(error)
            return b"value"

    assert private.wait_for_message(Client(), "key", 1) == b"value"
    with pytest.raises(jax.errors.JaxRuntimeError, match="gone"):
        private.wait_for_message(Client(), "key", 1)


def test_casts_of_jax_but_those_of_draws():
    jax = pytest.importorskip("jax")
    from fmapper_adapters.jax import _private as private

    wide, single = jax.numpy.dtype("float64"), jax.numpy.dtype("float32")
    draw = jax.random.truncated_normal
    with jax.enable_x64(True):
        x = jax.numpy.ones(3, wide)
        with private.change_casts(lambda dtype: wide if dtype == single else dtype):
            assert x.astype(single).dtype == wide
            assert (
                jax.random.truncated_normal(jax.random.key(0), -2, 2, (3,), single).dtype == single
            )
        assert x.astype(single).dtype == single
    assert jax.random.truncated_normal is draw


def test_modes_of_dispatch():
    seen = []

    class Watching(_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen


def test_what_transformers_does_not_save():
    transformers = pytest.importorskip("transformers")
    assert transformers.PreTrainedModel._keys_to_ignore_on_save is None
    assert _private.names_not_to_save(transformers.PreTrainedModel) == []


def test_where_a_recording_is():
    from fmapper_adapters.torch.record.marks import marks_of_recording, name_in_recording

    class Inner(torch.nn.Module):
        def forward(self, x):
            return x + 1

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(self.inner(x)) * 2

    outer, places, names = Outer(), [], []

    def look(module, args, result):
        place = _private.place_in_recording()
        if place is not None:
            assert _private.node_in_recording(result) is not None
            places.append(place[:2])
            names.append(name_in_recording(result, {}))

    def begin(module, args):
        if _private.place_in_recording() is not None:
            _private.note_lines(Outer.forward.__code__, lambda frame: {})

    outer.register_forward_pre_hook(begin)
    outer.inner.register_forward_hook(look)
    assert _private.place_in_recording() is None
    exported = torch.export.export(outer, (torch.ones(2),), strict=False)
    assert places == [("inner", "inner"), ("inner@1", "inner")]
    marks = marks_of_recording(exported.graph)
    made = {node.name: node for node in exported.graph.nodes}
    assert [made[marks[name]].target for name in names] == [torch.ops.aten.add.Tensor] * 2
    last = [node for node in made.values() if node.op == "call_function"][-1]
    assert _private.line_of_node(last).startswith(__file__)
    assert _private.name_of_place("L__self__a.b@3", "L['self'].a.b") == ("a.b@3", "a.b")


def test_placements_of_fully_shard():
    from torch.distributed.tensor import Replicate, Shard

    strided = _private.strided_shard(1, 4)
    assert strided.dim == 1
    assert _private.parts_before(strided) == 4
    assert _private.parts_before(Shard(1)) is None
    assert _private.parts_before(Replicate()) is None


def test_a_batch_of_one_in_training():
    x, functions = torch.ones(1, 3), torch.nn.functional
    with pytest.raises(ValueError, match="more than 1 value"):
        functions.batch_norm(x, None, None, training=True)
    with _private.any_batch_size():
        assert functions.batch_norm(x, None, None, training=True).shape == (1, 3)
    with pytest.raises(ValueError, match="more than 1 value"):
        functions.batch_norm(x, None, None, training=True)
