"""How many tokens a second does a converted language model generate, beside torch and beside Flax?

    python benchmarks/generate.py [--rounds 5] [--widths 128 256 512] [--compiled] [--clock cpu]
    python benchmarks/generate.py --device cuda
    python benchmarks/generate.py --recording
    python benchmarks/generate.py --dispatch

A Llama of four layers with random weights, greedy, three prompts of unequal lengths, 64 new tokens.
One thread, as many as there are (`--threads 2`) or one GPU (`--device cuda`), float32; calls run
interleaved in one process, the figures are medians of the quotients within a round. `--compiled`
has torch.compile, which takes minutes to compile; `--clock cpu` reads the time of the process, for
a machine that is loaded; `--rows 1` has one prompt in place of three. `--recording` has the
creation of a generator beside `torch.export` of the same two programs, and `--dispatch` a call of
the compiled loop that makes no step beside `jax.jit` of the same loop over flat leaves.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

from _interleave import interleave, paired
from _report import machine

LAYERS, HEADS, KV_HEADS, TOKENS, NEW, LENGTH = 4, 8, 4, 1000, 64, 80
ROWS, WIDTH = 3, 9


def torch_model(width: int, layers: int = LAYERS, device: str = "cpu") -> Any:
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(device)


def prompts(rows: int = ROWS) -> tuple[Any, Any]:
    """Up to three prompts, padded on the left."""
    import torch

    tokens = torch.randint(1, TOKENS, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :2] = 0
    return (tokens * mask)[-rows:], mask[-rows:]


class FlaxDecoder:
    """The same model by hand: modules of NNX, one loop that is compiled, donated caches."""

    def __init__(self, model: Any) -> None:
        from flax import nnx

        import fmapper

        config = model.config
        width, head = config.hidden_size, config.hidden_size // HEADS
        linear = partial(nnx.Linear, use_bias=False, precision="highest", rngs=nnx.Rngs(0))
        norm = partial(nnx.RMSNorm, epsilon=config.rms_norm_eps, rngs=nnx.Rngs(0))

        class Layer(nnx.Module):
            def __init__(self) -> None:
                self.q, self.o = linear(width, HEADS * head), linear(HEADS * head, width)
                self.k, self.v = (linear(width, KV_HEADS * head) for _ in range(2))
                self.gate, self.up = (linear(width, 4 * width) for _ in range(2))
                self.down = linear(4 * width, width)
                self.before, self.between = norm(width), norm(width)

        class Decoder(nnx.Module):
            def __init__(self) -> None:
                self.embed = nnx.Embed(TOKENS, width, rngs=nnx.Rngs(0))
                self.layers = nnx.List([Layer() for _ in range(LAYERS)])
                self.norm, self.head = norm(width), linear(width, TOKENS)

        net = Decoder()
        weights = fmapper.to_jax(dict(model.state_dict()))
        net.embed.embedding[...] = weights["model.embed_tokens.weight"]
        net.norm.scale[...] = weights["model.norm.weight"]
        net.head.kernel[...] = weights["lm_head.weight"].T
        names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
                 "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
                 "down": "mlp.down_proj"}  # fmt: skip
        norms = {"before": "input_layernorm", "between": "post_attention_layernorm"}
        for at, layer in enumerate(net.layers):
            for own, name in names.items():
                getattr(layer, own).kernel[...] = weights[f"model.layers.{at}.{name}.weight"].T
            for own, name in norms.items():
                getattr(layer, own).scale[...] = weights[f"model.layers.{at}.{name}.weight"]
        self.graph, self.state = nnx.split(net)
        self.theta, self.head = config.rope_parameters["rope_theta"], head
        self.compile()

    def compile(self) -> None:
        """Makes the two functions that are compiled."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        head, theta = self.head, self.theta

        def rotate(x: Any, positions: Any) -> Any:
            steps = theta ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
            angles = positions[..., None] * steps
            cos, sin = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))
            half = head // 2
            return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin

        def run(net: Any, tokens: Any, positions: Any, visible: Any, cache: Any, at: Any) -> Any:
            """Logits of the last token, and the cache; `visible` is (rows, columns, places)."""
            x = net.embed(tokens)
            rows, columns = tokens.shape
            new = []
            for layer, (keys, values) in zip(net.layers, cache, strict=True):
                y = layer.before(x)
                q, k, v = (
                    part(y).reshape(rows, columns, -1, head).swapaxes(1, 2)
                    for part in (layer.q, layer.k, layer.v)
                )
                q, k = rotate(q, positions), rotate(k, positions)
                k = jax.lax.dynamic_update_slice(keys, k, (0, 0, at, 0))
                v = jax.lax.dynamic_update_slice(values, v, (0, 0, at, 0))
                new.append((k, v))
                q = q.reshape(rows, KV_HEADS, HEADS // KV_HEADS, columns, head)
                scores = jnp.einsum("bkgqd,bksd->bkgqs", q, k, precision="highest") / head**0.5
                scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
                weights = jax.nn.softmax(scores)
                y = jnp.einsum("bkgqs,bksd->bkgqd", weights, v, precision="highest")
                y = y.reshape(rows, HEADS, columns, head).swapaxes(1, 2)
                x = x + layer.o(y.reshape(rows, columns, -1))
                y = layer.between(x)
                x = x + layer.down(nnx.silu(layer.gate(y)) * layer.up(y))
            return net.head(net.norm(x[:, -1])), new

        @partial(jax.jit, static_argnums=0)
        def start(graph: Any, state: Any, tokens: Any, mask: Any) -> Any:
            net = nnx.merge(graph, state)
            rows, columns = tokens.shape
            shape = (rows, KV_HEADS, LENGTH, head)
            cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS)]
            positions = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
            seen = jnp.pad(mask, ((0, 0), (0, LENGTH - columns))) > 0
            causal = jnp.arange(LENGTH) <= jnp.arange(columns)[:, None]
            visible = (seen[:, None] & causal) | (
                jnp.arange(LENGTH) == jnp.arange(columns)[:, None]
            )
            logits, cache = run(net, tokens, positions, visible, cache, 0)
            seen = seen | (jnp.arange(LENGTH) >= columns)
            return logits.argmax(-1), seen, mask.sum(1), cache

        @partial(jax.jit, static_argnums=0, donate_argnums=2)
        def rest(graph: Any, state: Any, carried: Any, texts: Any, at: Any) -> Any:
            net = nnx.merge(graph, state)

            def body(carry: Any) -> Any:
                at, texts, (token, seen, position, cache) = carry
                visible = (seen & (jnp.arange(LENGTH) <= at))[:, None]
                logits, cache = run(net, token[:, None], position[:, None], visible, cache, at)
                token = logits.argmax(-1)
                texts = jax.lax.dynamic_update_slice(texts, token[:, None], (0, at + 1))
                return at + 1, texts, (token, seen, position + 1, cache)

            last = at + NEW - 1
            return jax.lax.while_loop(lambda c: c[0] < last, body, (at, texts, carried))[1:]

        self.start, self.rest = start, rest

    def __call__(self, tokens: Any, mask: Any) -> Any:
        """Returns prompts and answers."""
        import jax.numpy as jnp

        width = tokens.shape[1]
        carried = self.start(self.graph, self.state, tokens, mask)
        texts = jnp.zeros((len(tokens), LENGTH), jnp.int32).at[:, :width].set(tokens)
        texts = texts.at[:, width].set(carried[0])
        texts, _ = self.rest(self.graph, self.state, carried, texts, width)
        return texts[:, : width + NEW]


def calls(width: int, *, compiled: bool, device: str = "cpu", rows: int = ROWS) -> dict[str, Any]:
    """A call of each, after all were found to give the same tokens."""
    import numpy as np
    import torch

    import fmapper

    model = torch_model(width, device=device)
    tokens, mask = prompts(rows)
    generator = fmapper.generator(model, max_length=LENGTH, batch=rows, max_new_tokens=NEW)
    hand = FlaxDecoder(model)
    given = (tokens.numpy().astype("int32"), mask.numpy().astype("int32"))
    tokens, mask = tokens.to(device), mask.to(device)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    found: dict[str, Any] = {
        "fmapper": lambda: generator(*given).block_until_ready(),
        "Flax by hand": lambda: hand(*given).block_until_ready(),
        "generate": lambda: model.generate(tokens, **options).cpu(),
        "generate, static": lambda: model.generate(
            tokens, **options, cache_implementation="static"
        ).cpu(),
    }
    if compiled:
        other = torch_model(width, device=device)
        other.load_state_dict(model.state_dict())
        other.forward = torch.compile(other.forward)
        found["generate, compiled"] = lambda: other.generate(
            tokens, **options, cache_implementation="static"
        ).cpu()
    wanted = found["generate"]().numpy()
    for name, call in found.items():
        if not np.array_equal(fmapper.to_numpy(call()), wanted):
            raise SystemExit(f"width {width}: {name} gives other tokens")
    return found


def recordings(model: Any) -> dict[str, Any]:
    """The creation of a generator, and torch's export of the same programs."""
    import torch

    import fmapper
    from fmapper_adapters.torch.generation import record

    def exports() -> None:
        own, _ = record._protocol_of(model, LENGTH, ROWS)
        tokens = torch.ones((ROWS, 7), dtype=torch.int64)
        mask = torch.ones_like(tokens)
        columns = torch.export.Dim("columns", min=2, max=LENGTH)
        shapes = {"tokens": {1: columns}, "mask": {1: columns}}
        torch.export.export(
            record._Prefill(own), (tokens, mask), dynamic_shapes=shapes, strict=False
        )
        logits, cache = own.prefill(tokens, mask)
        torch.export.export(record._Step(own), (logits.argmax(-1), cache), strict=False)

    return {
        "fmapper": lambda: fmapper.generator(model, max_length=LENGTH, batch=ROWS),
        "torch.export": exports,
    }


def dispatches(model: Any) -> dict[str, Any]:
    """A call of the loop that makes no step, and `jax.jit` of the same over flat leaves."""
    import jax
    import numpy as np

    import fmapper
    from fmapper_adapters.jax.generation import jax_generator, loop

    generator = fmapper.generator(model, max_length=LENGTH, batch=ROWS, max_new_tokens=NEW)
    tokens, mask = (one.numpy().astype("int32") for one in prompts())
    made: list[Any] = []

    class Call(jax_generator._Call):
        def advance(self, state: Any, until: int) -> Any:
            made[:] = [self, super().advance(state, until)]
            return made[1]

    before, jax_generator._Call = jax_generator._Call, Call  # type: ignore[misc]
    generator(tokens, mask)
    jax_generator._Call = before  # type: ignore[misc]
    call, state = made
    static = (generator._codes.run_step, generator.precision, call.fixed)
    rest = (call.knobs, call.key, np.int32(state["count"]))
    tree = jax.tree.structure(state)
    arrays = jax.tree.structure(call.arrays)

    def over_leaves(leaves: list[Any], carried: list[Any], *rest: Any) -> list[Any]:
        given = (arrays.unflatten(leaves), tree.unflatten(carried))
        return jax.tree.leaves(loop.loop.__wrapped__(*static, *given, *rest))

    flat = jax.jit(over_leaves, donate_argnums=1)
    held = jax.tree.leaves(call.arrays)
    print(f"{len(held)} arrays of the model, {tree.num_leaves} of the state")
    states = {"ours": jax.tree.map(lambda x: x.copy(), state), "flat": jax.tree.leaves(state)}

    def ours() -> None:
        states["ours"] = loop.loop(*static, call.arrays, states["ours"], *rest)
        jax.block_until_ready(states["ours"])

    def theirs() -> None:
        states["flat"] = flat(held, states["flat"], *rest)
        jax.block_until_ready(states["flat"])

    return {"fmapper": ours, "jit over flat leaves": theirs}


def compare(them: dict[str, Any], rounds: int, clock: Any) -> None:
    """Prints the medians and quotients of calls."""
    for call in them.values():
        call()
    timings = interleave(them, rounds, sample=0.02, clock=clock)
    print(", ".join(f"{n} {1e3 * median(t):,.3f} ms" for n, t in timings.items()))
    ours, theirs = timings.values()
    middle, low, high = paired(ours, theirs)
    print(f"  {middle:.2f} times the time of {[*timings][1]} ({low:.2f} to {high:.2f})")


def main() -> None:
    """Print a line for each width."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--recording", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--rows", type=int, default=ROWS, choices=(1, 2, 3))
    parser.add_argument("--threads", type=int, default=1, help="1, or all that JAX takes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if options.threads == 1:
        threads = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ.setdefault("XLA_FLAGS", threads)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has the same GPU
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    names = ("fmapper", "torch", "jax", "flax", "transformers")
    print(", ".join(f"{name} {value}" for name, value in machine(names).items()))
    clock = process_time if options.clock == "cpu" else perf_counter
    if options.recording:
        return compare(recordings(torch_model(256)), options.rounds, clock)
    if options.dispatch:
        return compare(dispatches(torch_model(32, layers=22)), options.rounds, clock)
    for width in options.widths:
        them = calls(width, compiled=options.compiled, device=options.device, rows=options.rows)
        timings = interleave(them, options.rounds, sample=0.02, clock=clock)
        rates = ", ".join(f"{n} {options.rows * NEW / median(t):,.0f}" for n, t in timings.items())
        print(f"width {width}, tokens per second: {rates}")
        for name, seconds in timings.items():
            if name != "fmapper":
                middle, low, high = paired(seconds, timings["fmapper"])
                print(f"  {middle:.2f} times {name} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
