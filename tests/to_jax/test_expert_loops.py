"""Loops over the experts that were hit: programs that are right for inputs which hit others."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402

pytestmark = pytest.mark.nightly

E, D = 4, 3


class Routed(torch.nn.Module):
    """Each token goes to two of four experts, which the last few never are."""

    def __init__(self, top_k: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top_k = top_k
        self.gate = torch.nn.Linear(D, E)
        self.up = torch.nn.Parameter(torch.randn(E, D, D))
        self.experts = torch.nn.ModuleDict({f"expert_{i}": torch.nn.Linear(D, D) for i in range(E)})
        self.counter = 0
        self.losses: list[Any] = []

    def route(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        with torch.no_grad():
            mask = torch.nn.functional.one_hot(chosen, E).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        return weights, mask, hit


class ByParameters(Routed):
    """As DBRX."""

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            expert = expert[0]  # noqa: PLW2901
            if expert == E:
                continue
            with torch.no_grad():
                rank, token = torch.where(mask[expert])
            up = self.up[expert]
            rows = self.act(x[token] @ up).view(-1, D) * weights[token, rank, None]
            found.index_add_(0, token, rows)
        return found

    def act(self, x: Any) -> Any:
        return torch.nn.functional.silu(x)


class WithDropped(ByParameters):
    """As DBRX: the mask has a row more, for tokens that go nowhere."""

    def route(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        with torch.no_grad():
            mask = torch.nn.functional.one_hot(chosen, E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        return weights, mask, hit

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            expert = expert[0]  # noqa: PLW2901
            with torch.no_grad():
                rank, token = torch.where(mask[expert])
            rows = self.act(x[token] @ self.up[expert]) * weights[token, rank, None]
            found.index_add_(0, token, rows)
        return found


class LeavesOutEmpty(Routed):
    """As LongCat-Flash: the last expert does nothing with its rows."""

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert_tensor in hit:
            expert = int(expert_tensor.item())
            rank, token = torch.where(mask[expert].squeeze(0))
            if token.numel() == 0:
                continue
            rows = x[token]
            if expert < E - 1:
                rows = torch.nn.functional.linear(rows, self.up[expert])
            rows = rows * weights[token, rank, None]
            found.index_add_(0, token, rows.to(x.dtype))
        return found


class LeavesOutInOtherWords(Routed):
    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            rank, token = torch.where(mask[expert[0]])
            if not len(token):
                continue
            if token.shape[0] < 1:
                continue
            rows = x[token] @ self.up[expert[0]]
            found.index_add_(0, token, rows * weights[token, rank, None])
        return found


class ByNames(Routed):
    """As SwitchTransformers and NLLB-MoE."""

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            rank, token = torch.where(mask[expert].squeeze(0))
            rows = x[None, token].reshape(-1, D)
            rows = self.experts[f"expert_{expert[0]}"](rows) * weights[token, rank, None]
            rows *= 0.5
            found.index_add_(0, token, rows)
        return found


class Assigns(Routed):
    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            rank, token = torch.where(mask[expert[0]])
            found[token] += (x[token] @ self.up[expert[0]]) * weights[token, rank, None]
        return found


class ByLayers(Routed):
    """As Mixtral's first: a name stands for the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            layer = self.layers[expert]
            rank, token = torch.where(mask[expert].squeeze(0))
            rows = layer(x[None, token].reshape(-1, D)) * weights[token, rank, None]
            found.index_add_(0, token, rows)
        return found


class NegativeMask(Routed):
    """A sum of zero does not mean that there is none."""

    def forward(self, x: Any) -> Any:
        signs = torch.sign(x).to(torch.int64).T  # [D, tokens]
        found = torch.zeros_like(x)
        for expert in torch.greater(signs.sum(-1), 0).nonzero():
            (token,) = torch.where(signs[expert[0]])
            found.index_add_(0, token, x[token] @ self.up[expert[0]])
        return found


@pytest.mark.parametrize(
    "kind",
    [
        ByParameters,
        WithDropped,
        LeavesOutEmpty,
        LeavesOutInOtherWords,
        ByNames,
        Assigns,
        ByLayers,
        NegativeMask,
    ],
)
def test_inputs_that_hit_other_experts(kind: Any) -> None:
    module = kind()
    x = torch.randn(5, D)
    model = fmapper.convert(module, "jax", (x,))
    compiled = jax.jit(lambda params, x: model.replace(params=params)(x))
    one = x[:1].expand(5, D).contiguous()
    others = [x, -x, one, -one, torch.randn(5, D) * 9, torch.zeros(5, D)]
    for given in others:
        converting.compare(compiled(model.params, given.numpy()), module(given))
    for given in others[:3]:
        module.zero_grad()
        module(given).square().sum().backward()
        found = jax.jit(jax.grad(lambda p, x: (model.replace(params=p)(x) ** 2).sum()))(
            model.params, given.numpy()
        )
        for name, parameter in module.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            converting.compare(found[name], wanted)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(0.3 * torch.randn_like(parameter))
    trained = {name: value.detach().numpy() for name, value in module.named_parameters()}
    for given in others:
        converting.compare(compiled(trained, given.numpy()), module(given))


class Counts(Routed):
    """The place in the loop is not the expert."""

    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        count = 0
        for expert in hit:
            count += 1  # noqa: SIM113
            rank, token = torch.where(mask[expert[0]])
            found.index_add_(0, token, count * x[token] * weights[token, rank, None])
        return found


class Enumerates(Routed):
    def forward(self, x: Any) -> Any:
        weights, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for i, expert in enumerate(hit):
            rank, token = torch.where(mask[expert[0]])
            found.index_add_(0, token, (i + 1) * x[token] * weights[token, rank, None])
        return found


class Lists(Routed):
    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        means = []
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            means.append(x[token].sum(0) + 1)
        return torch.stack(means).sum(0)


class AddsToAll(Routed):
    """What is added is not in the places that were looked at."""

    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            found.add_(x[token].sum() + 1)
        return found


class KeepsInItself(Routed):
    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        self.losses = []
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            found.index_add_(0, token, self.expert(x[token]))
        return found + sum(self.losses)

    def expert(self, rows: Any) -> Any:
        self.losses.append(rows.square().sum() + 1)
        return rows


class ReadsTheLast(Routed):
    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            found.index_add_(0, token, x[token])
        return found * self.up[expert[0], 0]


class ChangesInPlace(Routed):
    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        found, scale = torch.zeros_like(x), torch.ones(1)
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            twice = scale.view(-1)
            twice *= 2
            found.index_add_(0, token, x[token] * scale)
        return found


class EndsOnAnother(Routed):
    """The rows that are asked for are not those that are added."""

    def forward(self, x: Any) -> Any:
        _, mask, hit = self.route(x)
        found = torch.zeros_like(x)
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            _, other = torch.where(mask[expert[0]] * (x[:, 0] > 0))
            if other.numel() == 0:
                continue
            found.index_add_(0, token, x[token])
        return found


@pytest.mark.parametrize(
    "kind",
    [
        Counts, Enumerates, Lists, AddsToAll, KeepsInItself, ReadsTheLast, ChangesInPlace,
        EndsOnAnother,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::fmapper.NotCompiledWarning")
@pytest.mark.filterwarnings("ignore:.* a call changes losses:fmapper.ConversionWarning")
def test_loops_that_do_more_are_right_or_refused(kind: Any) -> None:
    module = kind(top_k=1)
    torch.manual_seed(1)
    x = torch.randn(40, D)  # hits all, so that the examples do not tell
    assert len(module.route(x)[2]) == E
    try:
        model = fmapper.convert(module, "jax", (x,))
    except fmapper.ConversionError:
        return
    right = 0
    for given in (x, -x, x[:1].expand(40, D).contiguous(), torch.randn(40, D)):
        try:
            found = model(given.numpy())
        except fmapper.ProgramInputError:
            continue
        converting.compare(found, module(given))
        right += 1
    assert right


class Chosen(torch.nn.Module):
    """Each row goes to one layer, by its first number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(2))

    def are(self, x: Any, expert: int) -> Any:
        return x[:, 0] > 0 if expert else x[:, 0] < 0


class LeavesOutWithoutPlaces(Chosen):
    def forward(self, x: Any) -> Any:
        found = torch.zeros_like(x)
        for expert in range(2):
            (token,) = torch.where(self.are(x, expert))
            if token.shape[0] == 0:
                continue
            layer = self.layers[expert]
            found.index_add_(0, token, layer(x[token]))
        return found


class LooksForPlaces(Chosen):
    def forward(self, x: Any) -> Any:
        found = torch.zeros_like(x)
        for expert, layer in enumerate(self.layers):
            token = self.are(x, expert).nonzero().squeeze(-1)
            if len(token) > 0:
                found[token] += layer(x[token])
        return found


class LooksForTrue(Chosen):
    def forward(self, x: Any) -> Any:
        found = torch.zeros_like(x)
        for expert, layer in enumerate(self.layers):
            chosen = self.are(x, expert)
            if chosen.any():
                found[chosen] = layer(x[chosen])
        return found


class LeavesOutWithoutTrue(Chosen):
    def forward(self, x: Any) -> Any:
        found = torch.zeros_like(x)
        for expert, layer in enumerate(self.layers):
            chosen = self.are(x, expert)
            if chosen.sum().item() == 0:
                continue
            token = chosen.nonzero().flatten()
            found[token] += layer(x[token])
        return found


class LooksOnce(Chosen):
    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found = x.clone()
        if torch.any(chosen):
            found[chosen] = self.layers[0](x[chosen])
        return found * 2


class AsksForOne(Chosen):
    """A row more or less changes what is done."""

    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found = x.clone()
        if chosen.sum() > 1:
            found[chosen] = self.layers[0](x[chosen])
        return found


class LooksForOthers(Chosen):
    def forward(self, x: Any) -> Any:
        chosen, others = self.are(x, 0), self.are(x, 1)
        found = x.clone()
        if chosen.any():
            found[others] = self.layers[0](x[others])
        return found


class LooksAndAddsToAll(Chosen):
    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found = x.clone()
        if chosen.any():
            found.add_(x[chosen].sum() + 1)
        return found


class LooksAndNames(Chosen):
    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found = x.clone()
        if chosen.any():
            found = found + 1
        return found


class LooksAndKeeps(Chosen):
    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found, last = x.clone(), x.sum(0)
        if chosen.any():
            last = self.layers[0](x[chosen]).sum(0)
        return found + last


class LooksElse(Chosen):
    def forward(self, x: Any) -> Any:
        chosen = self.are(x, 0)
        found = x.clone()
        if chosen.any():
            found[chosen] = self.layers[0](x[chosen])
        else:
            found = found + 1
        return found


ASKS_FOR_ROWS = [
    LeavesOutWithoutPlaces, LooksForPlaces, LooksForTrue, LeavesOutWithoutTrue, LooksOnce,
]  # fmt: skip


@pytest.mark.parametrize("kind", ASKS_FOR_ROWS)
def test_conditions_that_ask_for_a_row(kind: Any) -> None:
    module, x = kind(), torch.randn(5, D)
    model = fmapper.convert(module, "jax", (x,))
    compiled = jax.jit(lambda params, x: model.replace(params=params)(x))
    for given in (x, -x, x.abs() + 1, -x.abs() - 1, torch.zeros(5, D)):
        converting.compare(compiled(model.params, given.numpy()), module(given).detach())


@pytest.mark.parametrize(
    "kind",
    [
        AsksForOne, LooksForOthers, LooksAndAddsToAll, LooksAndNames, LooksAndKeeps, LooksElse,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::fmapper.NotCompiledWarning")
def test_conditions_that_decide_more_are_right_or_refused(kind: Any) -> None:
    module, x = kind(), torch.randn(5, D)
    x[0] = -x[0].abs() - 1
    x[1] = -x[1].abs() - 1
    model = fmapper.convert(module, "jax", (x,))
    converting.compare(model(x.numpy()), module(x).detach())
    for given in (-x, x.abs() + 1, -x.abs() - 1, torch.zeros(5, D)):
        try:
            found = model(given.numpy())
        except fmapper.ProgramInputError:
            continue
        converting.compare(found, module(given).detach())


class OneMore(torch.nn.Module):
    """The caller chooses the experts, and may choose the row that has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: Any, chosen: Any) -> Any:
        with torch.no_grad():
            mask = torch.nn.functional.one_hot(chosen, E + 1).permute(1, 0)
            hit = torch.greater(mask.sum(-1), 0).nonzero()
        found = torch.zeros_like(x)
        for expert in hit:
            expert = expert[0]  # noqa: PLW2901
            (token,) = torch.where(mask[expert])
            found.index_add_(0, token, x[token] @ self.up[expert])
        return found


def test_an_expert_that_is_not_there_is_refused_where_it_is_hit() -> None:
    module, x = OneMore(), torch.randn(4, D)
    model = fmapper.convert(module, "jax", (x, torch.tensor([0, 1, 0, 1])))
    others = torch.tensor([3, 1, 2, 0])
    converting.compare(model(x.numpy(), others.numpy()), module(x, others).detach())
    beyond = np.array([0, E, 1, 1])
    with pytest.raises(fmapper.ProgramInputError, match=f"expert {E} is hit but does not exist"):
        model(x.numpy(), beyond)
    with pytest.raises(IndexError):
        module(x, torch.from_numpy(beyond))
    compiled = jax.jit(lambda params, x, chosen: model.replace(params=params)(x, chosen))
    with pytest.raises(Exception, match="is hit but does not exist"):
        jax.block_until_ready(compiled(model.params, x.numpy(), beyond))
