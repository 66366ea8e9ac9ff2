"""How fast do checkpoints get from one form to another, and what memory does that take?

    python benchmarks/checkpoints.py [--gigabytes 4] [--folder /tmp/x] [--rounds 3] [--json FILE]
    python benchmarks/checkpoints.py --gigabytes 16 --only '^(copy|transpose).*: fmapper$'
    python benchmarks/checkpoints.py --gigabytes 6 --only from_pretrained

`--only` runs the cases that match, by `case: way`.

A synthetic checkpoint like Llama's, bfloat16 in 8 shards, goes through fmapper and through the
scripts that people write, interleaved, each in a process of its own, with bytecode of both as an
installation has it. The peak is that of the resident memory above what the process has after its
imports, and the processor seconds count all threads. `cp` is the bound where bytes do not change.
"One by one" is what a careful person writes: each tensor is mapped, changed by torch and written.
The bars:

    memory   64 MiB and the largest panel, whatever the size of the checkpoint
    copy     at least 0.8 of the rate of `cp`; with `check` the result is read back as well
    change   at least 0.8 of the rate of the scripts
    load     no slower than safetensors' own loader
    model    `from_pretrained` in less than 4/3 of the weights, and no slower than transformers' own
             by more than 20 % and the recording, which "record alone" has
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from _report import machine

MAKE = """
import sys, ml_dtypes, numpy as np, fmapper
from fmapper.checkpoints.formats import safetensors
gigabytes, folder = float(sys.argv[1]), sys.argv[2]
d, f = 2048, 5632
shapes = {"q_proj": (d, d), "k_proj": (d // 4, d), "v_proj": (d // 4, d), "o_proj": (d, d),
          "gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f), "norm": (d, 1)}
rng = np.random.default_rng(0)
base = {n: rng.integers(0, 2**14, s, dtype=np.uint16).view(ml_dtypes.bfloat16)
        for n, s in shapes.items()}
layers = max(1, round(gigabytes * 1e9 / sum(a.nbytes for a in base.values())))
tree = {f"model.layers.{i}.{n}.weight": a[:] for i in range(layers) for n, a in base.items()}
size = sum(a.nbytes for a in tree.values())
safetensors.MOST_BYTES_OF_A_SHARD = size // 8 + max(a.nbytes for a in tree.values())
fmapper.save(tree, folder, "safetensors")
"""
MODEL = """
import sys, json, torch, transformers, ml_dtypes, fmapper
from pathlib import Path
from fmapper.checkpoints import LazyArray
gigabytes, folder = float(sys.argv[1]), Path(sys.argv[2])
wide = 1 if gigabytes < 3 else 2  # what is recorded is as long as the model is deep
d, f = 2048 * wide, 5632 * wide
layers = max(1, round(gigabytes * 1e9 / (9e7 * wide**2)))
config = transformers.LlamaConfig(hidden_size=d, intermediate_size=f, num_attention_heads=16,
    num_key_value_heads=4, vocab_size=32000, num_hidden_layers=layers,
    dtype="bfloat16", architectures=["LlamaForCausalLM"])
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
tree = {n: LazyArray.full(p.shape, 0.5, ml_dtypes.bfloat16) for n, p in model.named_parameters()}
fmapper.save(tree, folder, "safetensors")
config.save_pretrained(folder)
"""
RULES = """
rules = Rules([Transpose("model.layers.{i}.up_proj.weight"),
               Stack("model.layers.{i}.up_proj.weight", "model.layers.up_proj.weight", over="i")])
kernels = Rules([Transpose(f"model.layers.{{i}}.{name}_proj.weight")
                 for name in ("q", "k", "v", "o", "gate", "up", "down")])
"""
ONE_BY_ONE = """
import json, math, struct, torch
from pathlib import Path
from safetensors import safe_open
def one_by_one(change, dtype, itemsize, turned):
    Path(target).mkdir()
    for path in sorted(Path(source).glob('*.safetensors')):
        with safe_open(path, 'pt') as file, open(Path(target) / path.name, 'wb') as out:
            header, at = {}, 0
            for name in file.keys():
                shape = file.get_slice(name).get_shape()
                end = at + math.prod(shape) * itemsize
                header[name] = {'dtype': dtype, 'shape': shape[::-1] if turned else shape,
                                'data_offsets': [at, end]}
                at = end
            text = json.dumps(header).encode()
            out.write(struct.pack('<Q', len(text)) + text)
            for name in file.keys():
                out.write(change(file.get_tensor(name)).view(torch.uint8).numpy())
"""
OURS = "from fmapper.checkpoints import *\n" + RULES
LIBRARY = """
from pathlib import Path
from safetensors.{0} import load_file, save_file
arrays = {{}}
"""
READ = "for path in sorted(Path(source).glob('*.safetensors')): arrays |= load_file(path)\n"
CASES: dict[str, dict[str, tuple[str, str]]] = {
    "copy": {
        "cp -r": ("import shutil", "shutil.copytree(source, target)"),
        "fmapper": (OURS, "convert_checkpoint(source, target, 'safetensors', check=False)"),
        "fmapper, compared": (OURS, "convert_checkpoint(source, target, 'safetensors')"),
        "load all, save": (
            LIBRARY.format("torch"),
            READ + "Path(target).mkdir(); save_file(arrays, target + '/model.safetensors')",
        ),
    },
    "float32": {
        "fmapper": (
            OURS,
            "convert_checkpoint(source, target, 'safetensors', dtype='float32', check=False)",
        ),
        "one by one": (ONE_BY_ONE, "one_by_one(torch.Tensor.float, 'F32', 4, False)"),
        "load all, change, save": (
            LIBRARY.format("torch"),
            READ + "arrays = {n: a.float() for n, a in arrays.items()}\n"
            "Path(target).mkdir(); save_file(arrays, target + '/model.safetensors')",
        ),
    },
    "transpose": {
        "fmapper": (
            OURS,
            "convert_checkpoint(source, target, 'safetensors', rules=kernels, check=False)",
        ),
        "one by one": (ONE_BY_ONE, "one_by_one(lambda a: a.t().contiguous(), 'BF16', 2, True)"),
        "load all, change, save": (
            LIBRARY.format("torch"),
            READ + "arrays = {n: a.t().contiguous() for n, a in arrays.items()}\n"
            "Path(target).mkdir(); save_file(arrays, target + '/model.safetensors')",
        ),
    },
    "transpose and stack": {
        "fmapper": (
            OURS,
            "convert_checkpoint(source, target, 'safetensors', rules=rules, check=False)",
        ),
        "load all, change, save": (
            LIBRARY.format("torch") + "import torch",
            READ + "ups = [n for n in arrays if 'up_proj' in n]\n"
            "arrays['up'] = torch.stack([arrays.pop(n).t() for n in ups]).contiguous()\n"
            "Path(target).mkdir(); save_file(arrays, target + '/model.safetensors')",
        ),
    },
    "load into torch": {
        "fmapper": (
            "import fmapper, torch",
            "kept = fmapper.to_torch(fmapper.load(source))",
        ),
        "safetensors.torch": (
            LIBRARY.format("torch"),
            READ + "kept = {n: a.clone() for n, a in arrays.items()}",
        ),
    },
    "load into JAX": {
        "fmapper": (
            "import fmapper, jax",
            "kept = jax.block_until_ready(fmapper.to_jax(fmapper.load(source)))",
        ),
        "safetensors.flax": (
            LIBRARY.format("flax") + "import jax",
            READ + "jax.block_until_ready(arrays)",
        ),
    },
}
MODELS: dict[str, dict[str, tuple[str, str]]] = {
    "from_pretrained": {
        "transformers": (
            "import torch, transformers",
            "kept = transformers.AutoModelForCausalLM.from_pretrained(source)",
        ),
        "transformers, in memory": (
            "import torch, transformers",
            "kept = transformers.AutoModelForCausalLM.from_pretrained(source)\n"
            "for tensor in kept.parameters(): tensor.data = tensor.data.clone()",
        ),
        "fmapper, torch": (
            "import fmapper, torch, transformers",
            "kept = fmapper.from_pretrained(source, 'torch')",
        ),
        "fmapper, flax": (
            "import fmapper, torch, transformers, jax, flax",
            "kept = jax.block_until_ready(fmapper.from_pretrained(source, 'flax'))",
        ),
        "record alone": (
            "import fmapper, torch, transformers, jax, flax\n"
            "from pathlib import Path\n"
            "from fmapper_adapters.torch.pretrained import folder\n",
            "found = folder.read(Path(source), None, fmapper.load(source))\n"
            "kept = fmapper.convert(found.model, 'flax', (), found.example_kwargs, "
            "dynamic_shapes=found.dynamic_shapes)",
        ),
    },
}
RUN = """
import json, mmap, resource, sys, time
source, target = sys.argv[1:3]
def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
{setup}
def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) // 1024
with mmap.mmap(-1, int(sys.argv[3]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
start, used = time.perf_counter(), processor()
{work}
seconds = time.perf_counter() - start, processor() - used
print(json.dumps([*seconds, memory("VmHWM") - before]))
"""


def measure(setup: str, work: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Runs one way in a process of its own; returns its seconds, those of processors, and MiB.

    Memory as large as the checkpoint is touched and freed first: a virtual machine gives memory
    that was free for two seconds back to its host, and whoever takes it next would pay for it.
    """
    code = RUN.format(setup=setup, work=work)
    size = sum(path.stat().st_size for path in source.iterdir())
    command = [sys.executable, "-c", code, str(source), str(target), str(size + (1 << 30))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
    shutil.rmtree(target, ignore_errors=True)
    seconds, used, mebibytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, used, mebibytes


@functools.cache
def _environment() -> dict[str, str]:
    """Returns an environment in which modules are compiled once, whatever this one says."""
    kept = {**os.environ, "PYTHONPYCACHEPREFIX": tempfile.mkdtemp()}
    atexit.register(shutil.rmtree, kept["PYTHONPYCACHEPREFIX"])
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept


def rounds(
    cases: dict[str, dict[str, tuple[str, str]]],
    count: int,
    source: Path,
    target: Path,
    say: Callable[[str], None],
) -> dict[str, object]:
    """Measures every case; returns the medians."""
    found: dict[str, object] = {}
    for case, ways in cases.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        processors: dict[str, list[float]] = {way: [] for way in ways}
        peaks: dict[str, int] = dict.fromkeys(ways, 0)
        for setup, work in ways.values():  # which compiles the modules
            measure(setup, work, source, target)
        for _ in range(count):
            for way, (setup, work) in ways.items():
                seconds, used, mebibytes = measure(setup, work, source, target)
                times[way].append(seconds)
                processors[way].append(used)
                peaks[way] = max(peaks[way], mebibytes)
        size = sum(path.stat().st_size for path in source.iterdir())
        for way in ways:
            seconds, used = median(times[way]), median(processors[way])
            say(
                f"{case:20} {way:22} {seconds:7.2f} s {size / seconds / 1e9:6.2f} GB/s "
                f"{used:7.2f} s of processors {peaks[way]:7} MiB",
            )
            found[f"{case}: {way}"] = {
                "seconds": seconds,
                "processor": used,
                "mebibytes": peaks[way],
            }
    return found


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="a regular expression")
    options = parser.parse_args()
    about = machine(["fmapper", "torch", "jax", "safetensors", "numpy"])
    say = functools.partial(print, flush=True)
    say(about)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        found: dict[str, object] = {}
        for make, all_cases in ((MAKE, CASES), (MODEL, MODELS)):
            cases = {
                case: {w: way for w, way in ways.items() if re.search(options.only, f"{case}: {w}")}
                for case, ways in all_cases.items()
            }
            cases = {case: ways for case, ways in cases.items() if ways}
            if not cases:
                continue
            source = Path(name) / "source"
            command = [sys.executable, "-c", make, str(options.gigabytes), str(source)]
            subprocess.run(command, check=True)
            found |= rounds(cases, options.rounds, source, Path(name) / "target", say)
            shutil.rmtree(source)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": about, "found": found}, indent=2))


if __name__ == "__main__":
    main()
