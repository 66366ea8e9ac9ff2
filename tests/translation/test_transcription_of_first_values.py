"""First values of transcribed models of a library: those that its `_init_weights` gives."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from transformers import initialization as init  # noqa: E402

from fmapper_translate import transcribe  # noqa: E402


class SmallConfig(transformers.PreTrainedConfig):
    width: int = 16
    initializer_range: float = 0.5


class Table(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rows = nn.Embedding(20, config.width, padding_idx=3)
        self.shift = nn.Parameter(torch.empty(1, config.width))
        self.register_buffer("places", torch.zeros(20))


class Small(transformers.PreTrainedModel):
    config_class = SmallConfig

    def _init_weights(self, module):
        """Gives first values."""
        super()._init_weights(module)
        if isinstance(module, Table):
            init.trunc_normal_(module.shift, std=self.config.initializer_range)
            init.copy_(module.places, torch.arange(20))
        elif isinstance(module, Absent):
            init.sparse_(module.weight, 0.5)
        elif isinstance(module, nn.Conv1d):
            init.kaiming_normal_(module.weight)
            if module.bias is not None:
                k = math.sqrt(module.groups / (module.in_channels * module.kernel_size[0]))
                init.uniform_(module.bias, a=-k, b=k)


class Absent(nn.Linear):
    pass


class Tower(Small):
    def __init__(self, config):
        super().__init__(config)
        self.fc = nn.Linear(config.width, config.width)
        nn.init.ones_(self.fc.bias)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            init.lecun_normal_(module.weight)

    def forward(self, x):
        return self.fc(x)


class Model(Small):
    def __init__(self, config):
        super().__init__(config)
        self.table = Table(config)
        self.conv = nn.Conv1d(config.width, config.width, 3)
        self.normed = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(config.width, config.width, 1)
        )
        self.tower = Tower(config)
        self.norm = nn.LayerNorm(config.width)
        nn.init.zeros_(self.norm.weight)
        self.head = nn.Linear(config.width, config.width, bias=False)
        self.post_init()

    def forward(self, ids):
        x = (self.table.rows(ids) + self.table.shift + self.table.places[:1]).transpose(1, 2)
        x = self.normed(self.conv(x)).transpose(1, 2)
        return self.head(self.norm(self.tower(x)))


@pytest.mark.nightly
def test_a_model_of_a_library_begins_with_the_values_of_its_source():
    torch.manual_seed(0)
    model, ids = Model(SmallConfig()).eval(), torch.arange(6)[None]
    made = transcribe(model, (ids,), ((model.config,), {}))
    assert "Parameters begin" not in made.code
    space = {}
    exec(made.code, space)
    theirs = [Model(SmallConfig()).state_dict() for _ in range(12)]
    ours = [
        space["source_state"](eval(made.example, space | {"rngs": nnx.Rngs(i)})) for i in range(12)
    ]
    for name in made.weights:
        a = np.stack([state[name].numpy() for state in theirs])
        b = np.stack([np.asarray(state[name]) for state in ours])
        bound = 6 * max(a.std(), b.std()) / a.size**0.5 + 1e-6
        assert abs(a.mean() - b.mean()) < bound, name
        assert abs(a.std() - b.std()) < bound, name
    assert np.array_equal(ours[0]["table.rows.weight"][3], np.zeros(16))
    assert np.array_equal(ours[0]["tower.fc.bias"], np.ones(16))
    assert np.array_equal(ours[0]["norm.weight"], np.ones(16))
