"""A small Llama learns English in torch, and a tokenizer with it; both write in JAX.

The text is what every Python carries with it, the documentation of its statements. A byte-pair
tokenizer and a model of two layers are trained on it. Then `fmapper.generator` records the model
once, and JAX continues what was begun, as torch does it; it draws at random by a key; it is saved,
and loaded by a process that has no torch.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import fmapper

WINDOW = 48  # tokens
PROMPTS = ["If the", "The for statement is used", "A class definition defines"]
LATER = """
import json, sys
from fmapper.generation import Generator

generator = Generator.load(sys.argv[1])
print(generator(json.loads(sys.argv[2]), max_new_tokens=16).tolist())
assert not {"torch", "transformers"} & {*sys.modules}
"""


def corpus():
    """The prose of Python's documentation of its statements, a paragraph a line."""
    blocks = [block for text in topics.values() for block in re.split(r"\n{2,}", text)]
    prose = [re.sub(r"\s+", " ", block).strip() for block in blocks if re.match("[A-Z]", block)]
    return list(dict.fromkeys(prose))[:1500]


def learn_tokens(lines, size):
    """A byte-pair tokenizer for these lines; the first token is padding, the second an end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def learn_text(tokenizer, lines, steps):
    """A Llama that has seen the lines, in evaluation mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    data = torch.tensor([t for line in lines for t in (*tokenizer.encode(line).ids, 1)])
    optimizer = torch.optim.AdamW(model.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps + 1)
    for number in range(1, steps + 1):
        starts = torch.randint(len(data) - WINDOW, (16, 1))
        batch = data[starts + torch.arange(WINDOW)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if number % max(steps // 5, 1) == 0:
            print(f"  step {number:>4}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def padded(rows):
    """Tokens and mask as `generate` of torch takes them."""
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return tokens, (tokens != 0).long()


def seconds(call):
    """The time of the quickest of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main(arguments=None):
    """Trains, makes the generator, and prints what it writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    options = parser.parse_args(arguments)
    lines = corpus()
    tokenizer = learn_tokens(lines, 800)
    print(f"training in torch on {len(lines)} paragraphs", flush=True)
    model = learn_text(tokenizer, lines, options.steps)

    start = time.perf_counter()
    generator = fmapper.generator(model, max_length=96, batch=len(PROMPTS))
    print(f"recorded in {time.perf_counter() - start:.1f} s: {generator}")

    rows = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    tokens, mask = padded(rows)
    greedy = {"max_new_tokens": 48, "do_sample": False}
    got = np.asarray(generator(rows, **greedy))
    with torch.no_grad():
        want = model.generate(tokens, attention_mask=mask, **greedy).numpy()
    for row in got.tolist():
        print("  " + tokenizer.decode([token for token in row if token > 1]))
    print(f"torch writes {'the same' if np.array_equal(got, want) else 'other words'}")
    assert np.array_equal(got, want)

    print("\nat random, as it comes:\n  ", end="")
    drawn = generator.stream(
        rows[:1], key=jax.random.key(0), do_sample=True, temperature=0.8, top_p=0.9
    )
    for token in itertools.islice(drawn, 40):
        print(tokenizer.decode(token.tolist()), end="", flush=True)

    free = {"max_new_tokens": 48, "eos_token_id": None}
    ours = seconds(lambda: generator(rows, **free).block_until_ready())
    theirs = seconds(lambda: model.generate(tokens, attention_mask=mask, **free, do_sample=False))
    rates = [len(rows) * 48 / one for one in (ours, theirs)]
    print(f"\n\n{rates[0]:,.0f} tokens a second; generate {rates[1]:,.0f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "english.safetensors"
        generator.save(path)
        command = [sys.executable, "-c", LATER, str(path), json.dumps(rows)]
        later = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(later.stdout) == got[:, : tokens.shape[1] + 16].tolist()
    print("a process without torch writes the same")


if __name__ == "__main__":
    main()
