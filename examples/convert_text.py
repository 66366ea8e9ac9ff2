"""A text model of Hugging Face, run by JAX: converted, verified, and used to write on.

The model is a GPT-2 with random weights, so small that nothing is downloaded; what it writes means
nothing, but it is what torch writes. `load()` has the line for real weights.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fmapper


def load():
    """A model of two layers and 100 tokens.

    For real weights this is all:

        return GPT2LMHeadModel.from_pretrained("openai-community/gpt2").eval()

    `from_pretrained` downloads the checkpoint once; any other causal model, as
    `AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")`, goes the same way. Only the lines
    that make tokens of text are different: `AutoTokenizer.from_pretrained` of the same name.
    """
    config = GPT2Config(
        vocab_size=100,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def write_on(model, tokens, count):
    """The tokens, of shape (batch, length), and the likeliest `count` that follow each row.

    The length of the array is fixed, so that one program is compiled for all steps: what is behind
    the last token is masked by causality.
    """
    batch, length = tokens.shape
    padded = jnp.zeros((batch, length + count), tokens.dtype).at[:, :length].set(tokens)

    @jax.jit
    def step(model, tokens, at):
        logits = model(tokens, use_cache=False).logits
        likeliest = logits[:, at - 1].argmax(-1).astype(tokens.dtype)
        return tokens.at[:, at].set(likeliest)

    for at in range(length, length + count):
        padded = step(model, padded, at)
    return padded


def main():
    """Converts, compares, writes on, and prints what it found."""
    model = load()
    examples = torch.randint(1, 100, (2, 12))
    start = time.perf_counter()
    converted = fmapper.convert(
        model, "jax", (examples,), {"use_cache": False}, dynamic_shapes="auto"
    )
    print(f"converted in {time.perf_counter() - start:.1f} s: {converted}")

    # Batch and length may vary: these are not the shapes that it was converted with.
    prompt = torch.randint(1, 100, (3, 8))
    report = fmapper.verify(model, converted, prompt, example_kwargs={"use_cache": False})
    print(f"torch and JAX: {report}")
    assert report

    got = write_on(converted, jnp.asarray(prompt.numpy()), 16)
    want = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
    )
    print(f"JAX writes    {got[0, 8:].tolist()}")
    print(f"torch writes  {want[0, 8:].tolist()}")
    assert np.array_equal(got, want.numpy())


if __name__ == "__main__":
    main()
