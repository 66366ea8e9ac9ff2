"""The checks of this project. The matrix that matters is which frameworks are installed.

`nox` runs the checks of a pull request, `nox -s oldest` one of them, `nox --force-python 3.13` all
of them on another Python.
"""

from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests", "docs", "package", "wheel"]
nox.options.reuse_existing_virtualenvs = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = ("-c", "constraints.txt")
# Its release 0.0.13 does not import with torch 2.13.
TORCHAX = "torchax @ git+https://github.com/google/torchax@b2d44f0"


def group(*names: str) -> tuple[str, ...]:
    """The requirements of some dependency groups: pip learned `--group` only in 25.1."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def oldest_versions() -> list[str]:
    """`name==x` for every `name>=x` that the package states."""
    project = PYPROJECT["project"]
    stated = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        stated += extra
    requirements = [Requirement(text) for text in stated]
    return [
        f"{requirement.name}=={specifier.version}"
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    ]


def program(session: nox.Session, name: str, *options: str) -> None:
    """Runs a program of tests/sweeps."""
    session.run("python", "-m", f"sweeps.{name}", *options, env={"PYTHONPATH": "tests"})


@nox.session
@nox.parametrize("frameworks", ["none", "numpy", "torch", "jax", "all"])
def tests(session: nox.Session, frameworks: str) -> None:
    """Run the tests with some of the frameworks; with all, also every example and doctest."""
    if frameworks == "all":
        session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
        session.run("python", "-m", "pytest", *session.posargs)
        return
    package = "." if frameworks == "none" else f".[{frameworks}]"
    session.install(*CONSTRAINTS, "-e", package, *group("test-core"))
    session.run("python", "-m", "pytest", "tests", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the tests marked `nightly`, or a part of their files: `nox -s nightly -- --shard 1/8`."""
    more = ("accelerate", "diffrax", "lineax", "optimistix", "peft", "penzai", "torchao")
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"), *more)
    session.run("python", "-m", "pytest", "-m", "nightly", *session.posargs)


@nox.session
def opinfo(session: nox.Session) -> None:
    """Convert every operation of torch's test database: `nox -s opinfo -- --shard 1/8`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "opinfo", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare twins that people wrote, with and without a mistake: `nox -s parity -- llama`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "parity", *session.posargs)


@nox.session
def twins(session: nox.Session) -> None:
    """Transfer weights between models written by different people: `nox -s twins -- llama`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    folder = session.create_tmp()
    alone = ("--no-deps", "--ignore-requires-python")  # their tables need einops alone
    session.install(*alone, "--target", folder, "google-tunix", "maxtext")
    env = {"TWINS_PACKAGES": folder}
    tests = "tests/checkpoints/test_recording_frameworks.py"
    session.run("python", "-m", "pytest", "-m", "nightly", tests, "-k", "tables", env=env)
    program(session, "twins", *session.posargs)


@nox.session
def sync(session: nox.Session) -> None:
    """Sync weights between processes, one of which dies, and measure what it costs."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    session.run("python", "-m", "pytest", "-m", "nightly or not nightly", "tests/sync")
    for part in ("one", "many", "ranks", "leak"):
        session.run("python", "benchmarks/sync.py", part)


@nox.session
def training_state(session: nox.Session) -> None:
    """Go on with runs of training and adapters in the other framework, for all that there are."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"), "accelerate", "peft")
    session.run("python", "-m", "pytest", "-m", "", "tests/training", *session.posargs)
    program(session, "lora")


@nox.session
def zoo(session: nox.Session) -> None:
    """Convert every model class of transformers to JAX: `nox -s zoo -- --shard 0/8 llama`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "zoo", *session.posargs)


@nox.session
def newest_zoo(session: nox.Session) -> None:
    """Convert a model of each architecture of the newest transformers, with the newest of all."""
    session.install("-U", "-e", ".[all]", *group("test"))
    program(session, "zoo", "--minutes", "300", *session.posargs)


@nox.session
def pretrained(session: nox.Session) -> None:
    """Take folders of transformers to models by rules, and back: `nox -s pretrained -- llama`.

    To models of Flax, and to folders again: `nox -s pretrained -- --to flax llama`.
    """
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "pretrained", *session.posargs)


@nox.session
def uses(session: nox.Session) -> None:
    """Train, cast and decode with 40 converted models: `nox -s uses -- ':gradients$' '^bert/'`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "uses", *session.posargs)


@nox.session
def generate(session: nox.Session) -> None:
    """Generate text with every causal and encoder-decoder model: `nox -s generate -- '^llama/'`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "generate", *session.posargs)


@nox.session
def translate(session: nox.Session) -> None:
    """Write models of transformers as files for Flax and run them: `nox -s translate -- llama`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "translate", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Convert every layer of torch.nn with its options to JAX: `nox -s layers -- Conv`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "nn", *session.posargs)


@nox.session
def flaxzoo(session: nox.Session) -> None:
    """Convert models of JAX, Flax and Equinox to torch: `nox -s flaxzoo -- --export linen/`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "flaxzoo", *session.posargs)


@nox.session
def lax(session: nox.Session) -> None:
    """Convert JAX's own corpus of primitives to torch: `nox -s lax -- --group sort --per 0`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "lax", *session.posargs)


@nox.session
@nox.parametrize("environment", ["daily", "oldest", "newest", "torchax", "onnx"])
def scoreboard(session: nox.Session, environment: str) -> None:
    """Write docs/benchmarks/scoreboard.md: versions and peers side by side.

    Over some cases of each sweep, in minutes: `nox -s scoreboard -- --sample 12`.
    """
    requirements = {
        "daily": (*CONSTRAINTS, "-e", ".[all]", *group("test")),
        "oldest": ("-e", ".[all]", *oldest_versions(), *group("test")),
        "newest": ("-U", "-e", ".[all]", *group("test")),
        "torchax": (*CONSTRAINTS, "-e", ".[all]", *group("test"), TORCHAX),
        "onnx": (*CONSTRAINTS, "-e", ".[all]", *group("test"), "jax2onnx", "onnx2torch"),
    }[environment]
    options = (environment, "--page", "docs/benchmarks/scoreboard.md", *session.posargs)
    try:
        session.install(*requirements)
    except nox.command.CommandFailed as error:
        options += ("--failed", f"does not install: {error}")
    program(session, "scoreboard", *options)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare random programs after conversion, for an hour in each direction.

    Or as asked for: `nox -s fuzz -- jax-to-torch --minutes 5 --seed 7`.
    """
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    if session.posargs:
        direction, *options = session.posargs
        program(session, f"fuzz_{direction.replace('-', '_')}", *options)
        return
    for direction in ("torch_to_jax", "jax_to_torch"):
        program(session, f"fuzz_{direction}", "--minutes", "60")


@nox.session
def simulated(session: nox.Session) -> None:
    """Run the tests marked `gpu` on simulated GPUs, with late copies and with random ones.

    JAX sees simulated GPUs, too, and shares their memory with torch.
    Then plant mistakes, which some of them must find: `nox -s simulated -- 20` for 20 random seeds.
    """
    session.install(*CONSTRAINTS, "-e", ".[all]", "ninja", *group("test"))
    place = Path(session.create_tmp(), "jax")
    session.install("--no-deps", "--target", str(place), "xla-cpu-pjrt")
    plugins = ("-p", "support.simulated_gpu", "-p", "support.simulated_jax")
    python = ("python", "-m", "pytest", "-q", "-n0", *plugins, "-m", "gpu")
    env = {"PYTHONPATH": "tests", "SIMULATED_JAX": str(place)}
    seeds = int(session.posargs[0]) if session.posargs else 3
    for mode, seed in [("late", 0), *(("random", seed) for seed in range(seeds))]:
        order = {"SIMULATED_GPU_MODE": mode, "SIMULATED_GPU_SEED": str(seed)}
        session.run(*python, "tests", env={**env, **order})
    mistakes = ("pieces", "event", "buffer", "stream", "handover", "arrival", "begin")
    for mistake in mistakes:
        session.run(
            *(*python, "-x", "tests/moves/test_link.py", "tests/moves/test_loader.py"),
            env={**env, "SIMULATED_GPU_MISTAKE": mistake},
            success_codes=[1],
        )


@nox.session
def fuzz_files(session: nox.Session) -> None:
    """Damage a million files of programs: `nox -s fuzz_files -- --seed 3 --minutes 10`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "fuzz_files", *session.posargs)


@nox.session
def fuzz_checkpoints(session: nox.Session) -> None:
    """Damage a million checkpoints of all formats: `nox -s fuzz_checkpoints -- --seed 3`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("test"))
    program(session, "fuzz_checkpoints", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest supported version of everything."""
    session.install("-e", ".[all]", *oldest_versions(), *group("test-core", "programs"))
    session.run("python", "-m", "pytest", "tests", *session.posargs)


@nox.session(python=["3.12", "3.13"])
@nox.parametrize("torch", [False, True])
def newest(session: nox.Session, torch: bool) -> None:
    """Run the tests with the newest release of everything; torch brings gigabytes of CUDA along."""
    if torch:
        session.install("-U", "-e", ".[all]", *group("test"))
    else:
        session.install("-U", "-e", ".[flax]", "equinox", *group("test-core", "programs"))
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", "tests", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install(*CONSTRAINTS, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types, against the types of the frameworks; and what a user's program sees."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("types", "test"))
    session.run("mypy")
    session.run("python", "-m", "pytest", "-n0", "-m", "", "tests/house/test_types.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, a warning is an error, and check it: `nox -s docs -- --browser`."""
    session.install(*CONSTRAINTS, *group("docs"))
    if session.posargs:
        session.install("playwright")  # a Chromium comes from the system
    session.run("zensical", "build", "--strict", "--clean")
    session.run("python", "docs/check_site.py", "site", *session.posargs)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Execute the notebooks of the documentation and write their pages, or those named."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("examples", "notebooks"))
    session.run("python", "docs/notebooks/run.py", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build what an index gets, the wheel from the sdist, into dist/, and check it."""
    session.install(*CONSTRAINTS, *group("release"))
    built = Path("dist")
    for old in built.glob("fmapper-*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", str(built))
    session.run("twine", "check", "--strict", *map(str, sorted(built.iterdir())))


@nox.session(reuse_venv=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it with the core dependencies only, test it outside the checkout."""
    smoke = Path("tests/support/smoke.py").resolve()
    built = Path(session.create_tmp())
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(built), ".")
    (archive,) = built.glob("fmapper-*.whl")
    session.install(*CONSTRAINTS, str(archive))
    session.chdir(built)
    session.run("python", "-I", str(smoke))


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those named: `nox -s bench -- walk`."""
    session.install(*CONSTRAINTS, "-e", ".[all]", *group("examples", "bench"))
    named = session.posargs or sorted(path.stem for path in Path("benchmarks").glob("[!_]*.py"))
    for name in named:
        session.run("python", f"benchmarks/{name}.py")
