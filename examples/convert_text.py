"""A text model of Hugging Face learns to write in torch, and writes in JAX.

A small GPT-2 is trained for half a minute on what every Python carries with it, the Zen and the
documentation of its statements; then it is converted to JAX, verified, and continues what was
begun, word for word as it does in torch. `load()` has the line for a model with real weights.
"""

import argparse
import codecs
import contextlib
import io
import re
import textwrap
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fmapper

TOPICS = ["if", "for", "while", "try", "with", "class", "pass", "break", "lambda", "return"]
WINDOW = 48  # tokens
PROMPTS = ["Beautiful is better", "If the loop", "A class definition", "The expression list"]


def corpus():
    """The Zen of Python and the prose of some topics of its documentation, a paragraph a line."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself when it is imported
        import this
    zen = codecs.decode(this.s, "rot13").partition("\n\n")[2]
    texts = [zen] * 4 + [topics[name] for name in TOPICS if name in topics]
    paragraphs = [block for text in texts for block in re.split(r"\n{2,}", text)]
    prose = [block for block in paragraphs if re.match("[A-Z]", block)]
    return "\n".join(re.sub(r"\s+", " ", block).strip() for block in prose) + "\n"


def pieces(text):
    """Words with the space before them, signs, and ends of paragraphs."""
    return re.findall(r" ?\w+|\n|[^\w\n]", text)


class Tokens:
    """Numbers for the pieces of a text, as a tokenizer of Hugging Face gives them."""

    def __init__(self, text):
        """Numbers every piece that occurs."""
        self.pieces = sorted(set(pieces(text)))
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, text):
        """The numbers of a text, a list."""
        return [self.ids[piece] for piece in pieces(text)]

    def decode(self, ids):
        """The text up to the end of the paragraph."""
        return "".join(self.pieces[number] for number in ids).partition("\n")[0]


def load(vocabulary):
    """A model of two layers for a vocabulary of this size.

    For real weights this is all, and no training:

        return GPT2LMHeadModel.from_pretrained("openai-community/gpt2").eval()

    `from_pretrained` downloads the checkpoint once; any other causal model, as
    `AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")`, goes the same way. Only the lines
    that make tokens of text are different: `AutoTokenizer.from_pretrained` of the same name.
    """
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=128,
        n_embd=128,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def train(model, ids, steps):
    """Learns which token comes next, in torch; returns the model in evaluation mode."""
    data = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps + 1)
    for number in range(1, steps + 1):
        starts = torch.randint(len(data) - WINDOW, (16, 1))
        batch = data[starts + torch.arange(WINDOW + 1)]
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if number % max(steps // 8, 1) == 0:
            print(f"  step {number:>4}: loss {loss.item():.3f}", flush=True)
    return model.eval()


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


def main(arguments=None):
    """Trains, converts, compares, and prints what both have written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of training (default: 400)")
    parser.add_argument("--words", type=int, default=60, help="to write at most (default: 60)")
    options = parser.parse_args(arguments)
    text = corpus()
    tokens = Tokens(text)
    ids = tokens.encode(text)
    print(f"training in torch on {len(ids)} words and signs, {len(tokens.pieces)} different ones")
    start = time.perf_counter()
    model = train(load(len(tokens.pieces)), ids, options.steps)
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    examples = torch.randint(len(tokens.pieces), (2, 12))
    converted = fmapper.convert(
        model, "jax", (examples,), {"use_cache": False}, dynamic_shapes="auto"
    )
    print(f"converted in {time.perf_counter() - start:.1f} s: {converted}")

    # Batch and length may vary: these are not the shapes that it was converted with.
    passage = torch.tensor(ids[:96]).reshape(3, 32)
    report = fmapper.verify(model, converted, passage, example_kwargs={"use_cache": False})
    print(f"torch and JAX: {report}\n")
    assert report

    begun = np.array([tokens.encode(prompt) for prompt in PROMPTS])  # of one length
    got = np.asarray(write_on(converted, jnp.asarray(begun), options.words))
    want = model.generate(
        torch.from_numpy(begun),
        attention_mask=torch.ones(begun.shape, dtype=torch.int64),
        max_new_tokens=options.words,
        do_sample=False,
        pad_token_id=0,
    )
    ours, theirs = ([tokens.decode(row) for row in rows.tolist()] for rows in (got, want))
    for prompt, written in zip(PROMPTS, ours, strict=True):
        print(textwrap.fill(written.replace(prompt, f"[{prompt}]", 1), 88) + "\n")
    print(f"torch writes {'the same' if ours == theirs else 'other words'}")
    assert ours == theirs


if __name__ == "__main__":
    main()
