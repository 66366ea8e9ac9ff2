"""Functions and methods of PyTorch in files for Flax NNX, at two sizes."""

from __future__ import annotations

import importlib.util
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

from fmapper_translate import transcribe  # noqa: E402

CASES = {
    "rates": "F.cross_entropy(x, torch.softmax(y, -1))",
    "labels": "F.cross_entropy(x, c, label_smoothing=0.1, ignore_index=1)",
    "divergence": "F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction='batchmean')",
    "likelihood": "F.gaussian_nll_loss(x, y, x.exp())",
    "logits": "F.binary_cross_entropy_with_logits(x, torch.sigmoid(y))",
    "cosine": "F.cosine_similarity(x, y, dim=-1)",
    "instances": "F.instance_norm(x[:, None])",
    "responses": "F.local_response_norm(x[..., None], 3)",
    "pool": "F.max_pool1d(x[:, None], 2)",
    "window": "F.avg_pool1d(x[:, None], x.size(1) - 4)",
    "slope": "nn.Softplus(beta=3)(x)",
    "split": "x.split(3, -1)[-1] + x.chunk(2, -1)[0][:, :1]",
    "stack": "torch.hstack([x, y])",
    "zero": "x.clone().zero_() + y",
    "inverse": "torch.inverse(x[:4, :4] + 9 * torch.eye(4))",
    "numpy": "np.sqrt(x.size(-1)) * x + np.prod(x.shape)",
    "sizes": "F.pad(x, list(reversed([0, 0, 1, 2])))",
    "bytes": "x.element_size() * torch.numel(x) * x",
}


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    code = (
        "import numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    )
    for name, case in CASES.items():
        code += textwrap.dedent(f"""
            class {name.title()}(nn.Module):
                def forward(self, x, y, c):
                    return {case}
            """)
    path = tmp_path_factory.mktemp("source") / "calls_of_torch.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


@pytest.mark.parametrize("name", CASES)
def test_a_call_gives_what_it_gives_in_torch_at_two_sizes(space, name):
    torch.manual_seed(0)
    model = getattr(space, name.title())().eval()

    def inputs(rows, columns):
        labels = torch.randint(0, columns, (rows,))
        return torch.randn(rows, columns), torch.randn(rows, columns), labels

    made = transcribe(model, inputs(6, 8))
    assert not made.fallen
    written: dict = {}
    exec(made.code, written)
    net = eval(made.example, written | {"rngs": None})
    for sizes in ((6, 8), (7, 11)):
        given = inputs(*sizes)
        ours = net(*(jnp.asarray(x.numpy()) for x in given))
        theirs = model(*given).detach().numpy()
        assert ours.shape == theirs.shape
        assert jnp.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
