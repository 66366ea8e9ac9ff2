"""Classes that a file for torch has beside the model's own."""

from __future__ import annotations

from fmapper.translation import CHECK_SHAPES, Helper

_CONV = '''class {name}(nn.{base}):
    """{what} with the channels last, as in JAX; `pad` widens the input before, as `F.pad`."""

    def __init__(self, *args, pad=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.pad = pad

    def forward(self, x):
        x = x.movedim(-1, 1)
        if self.pad is not None and any(self.pad):
            x = F.pad(x, self.pad)
        return super().forward(x).movedim(1, -1)'''
_CONV_TRANSPOSE = '''class {name}(nn.{base}):
    """{what} with the channels last; `crop` narrows the result, as `F.pad`."""

    def __init__(self, *args, crop=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.crop = crop

    def forward(self, x):
        x = super().forward(x.movedim(-1, 1))
        if self.crop is not None:
            x = F.pad(x, self.crop)
        return x.movedim(1, -1)'''
_CHANNELS = '''class {name}(nn.{base}):
    """{what} with the channels last, as in JAX."""

    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)'''

_RECURRENT = '''class SingleBias{base}(nn.{base}):
    """An `nn.{base}` whose gates have one bias each, as in JAX: `bias_hh` stays 0."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name, bias in [*self.named_parameters()]:
            if name.startswith("bias_hh"):
                delattr(self, name)
                setattr(self, name, nn.Buffer(torch.zeros_like(bias), persistent=False))'''
_CLASSES = {"Conv": _CONV, "ConvTranspose": _CONV_TRANSPOSE}

HELPERS = {
    f"{name}Last": Helper(
        _CLASSES.get(name[:-2], _CHANNELS).format(name=f"{name}Last", base=name, what=what)
    )
    for name, what in {
        "Conv1d": "A convolution",
        "Conv2d": "A convolution",
        "Conv3d": "A convolution",
        "ConvTranspose1d": "A transposed convolution",
        "ConvTranspose2d": "A transposed convolution",
        "ConvTranspose3d": "A transposed convolution",
        "BatchNorm1d": "Normalisation of batches",
        "BatchNorm2d": "Normalisation of batches",
        "BatchNorm3d": "Normalisation of batches",
    }.items()
} | {
    f"SingleBias{base}": Helper(_RECURRENT.format(base=base)) for base in ("RNN", "GRU", "LSTM")
} | {
    "take_rows": Helper('''def take_rows(x, index, dim=0):
    """Returns rows at indices, as JAX: from the end where negative, the nearest where outside."""
    index = torch.where(index < 0, index + x.shape[dim], index)
    return x.index_select(dim, index.clamp(0, x.shape[dim] - 1).long())'''),
    "top_k": Helper('''def top_k(x, k, dim):
    """Returns the largest elements and where they are; equal ones in their order, as in JAX."""
    bits = x.detach().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    at = torch.sort(bits, dim=dim, descending=True, stable=True)[1].narrow(dim, 0, k)
    return x.gather(dim, at), at.int()'''),
    "segment_sum": Helper('''def segment_sum(values, segments, like):
    """Returns an array of zeros to whose rows values are added; not those of rows outside."""
    inside = (segments >= 0) & (segments < len(like))
    kept = torch.where(inside.reshape(-1, *[1] * (like.ndim - 1)), values, 0)
    return like.index_add(0, segments.clamp(0, len(like) - 1).long(), kept)'''),
    "segment_max": Helper('''def segment_max(values, segments, like):
    """Returns the larger of each row and the values for it; not those for rows outside."""
    column = [-1, *[1] * (like.ndim - 1)]
    inside = (segments >= 0) & (segments < len(like))
    kept = torch.where(inside.reshape(column), values, float("-inf"))
    to = segments.clamp(0, len(like) - 1).long().reshape(column).expand(values.shape)
    return like.scatter_reduce(0, to, kept, "amax")'''),
    "LoRALinear": Helper('''class LoRALinear(nn.Linear):
    """An `nn.Linear` to which a product of two matrices of a low rank is added."""

    def __init__(self, in_features, out_features, rank, bias=True):
        super().__init__(in_features, out_features, bias)
        self.lora_a = nn.Parameter(torch.randn(rank, in_features) * in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(out_features, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T'''),
    "NewBiasGRU": Helper('''class NewBiasGRU(nn.GRU):
    """An `nn.GRU` with one bias for each gate, and `bias_n` for the state in the new one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, bias=False, **kwargs)
        self.ends = ("_l0", "_l0_reverse") if self.bidirectional else ("_l0",)
        for end in self.ends:
            setattr(self, f"bias_ih{end}", nn.Parameter(torch.zeros(3 * self.hidden_size)))
            setattr(self, f"bias_n{end}", nn.Parameter(torch.zeros(self.hidden_size)))

    def forward(self, x, state=None):
        if state is None:
            shape = x.shape[1 - self.batch_first : 2 - self.batch_first] if x.ndim > 2 else ()
            state = x.new_zeros(len(self.ends), *shape, self.hidden_size)
        if x.ndim == 2:
            y, state = self(x.unsqueeze(1 - self.batch_first), state.unsqueeze(1))
            return y.squeeze(1 - self.batch_first), state.squeeze(1)
        arrays = []
        for end in self.ends:
            bias = F.pad(getattr(self, f"bias_n{end}"), (2 * self.hidden_size, 0))
            names = f"weight_ih{end}", f"weight_hh{end}", f"bias_ih{end}"
            arrays += [*(getattr(self, name) for name in names), bias]
        kind = True, 1, 0.0, self.training, self.bidirectional, self.batch_first
        return torch.gru(x, state, arrays, *kind)'''),
    "check_shapes": Helper(CHECK_SHAPES),
    "check": Helper('''def check(condition, message):
    """Raises where a condition does not hold."""
    if not condition:
        raise ValueError(message)'''),
    "BatchNormLast": Helper('''class BatchNormLast(nn.Module):
    """Normalisation of batches with the channels last, with running statistics as in Flax."""

    def __init__(self, num_features, *, eps, keep, affine=True):
        super().__init__()
        self.eps, self.keep = eps, keep
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.mean = nn.Buffer(torch.zeros(num_features))
        self.var = nn.Buffer(torch.ones(num_features))

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            axes = tuple(range(x.ndim - 1))
            mean, var = x.mean(axes), x.var(axes, correction=0)
            self.mean.lerp_(mean.detach(), 1 - self.keep)
            self.var.lerp_(var.detach(), 1 - self.keep)
        y = (x - mean) * torch.rsqrt(var + self.eps)
        return y if self.weight is None else y * self.weight + self.bias'''),
    "DebiasedBatchNorm": Helper('''class DebiasedBatchNorm(nn.Module):
    """Normalisation of batches with running statistics as in Equinox, divided by their weight."""

    def __init__(self, num_features, *, eps=1e-05, keep=0.99, affine=True):
        super().__init__()
        self.eps, self.keep = eps, keep
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.count = nn.Buffer(torch.tensor(0, dtype=torch.int32))
        self.running_mean = nn.Buffer(torch.zeros(num_features))
        self.running_var = nn.Buffer(torch.ones(num_features))

    def forward(self, x):
        if self.training:
            var, mean = torch.var_mean(x.detach(), (0, *range(2, x.ndim)), correction=0)
            self.count += 1
            self.running_mean.lerp_(mean, 1 - self.keep)
            self.running_var.lerp_(var, 1 - self.keep)
            return F.batch_norm(x, None, None, self.weight, self.bias, True, eps=self.eps)
        weight = torch.where(self.count == 0, 1.0, 1 - self.keep**self.count)
        mean, var = self.running_mean / weight, self.running_var / weight
        return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)'''),
    "AveragedBatchNorm": Helper('''class AveragedBatchNorm(nn.Module):
    """Normalisation by running statistics of batches, in training too, as in Equinox."""

    def __init__(self, num_features, *, eps=1e-05, keep=0.99, affine=True):
        super().__init__()
        self.eps, self.keep = eps, keep
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.is_first = nn.Buffer(torch.tensor(True))
        self.running_mean = nn.Buffer(torch.zeros(num_features))
        self.running_var = nn.Buffer(torch.ones(num_features))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            now_var, now_mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
            mean = torch.where(self.is_first, now_mean, torch.lerp(now_mean, mean, self.keep))
            var = torch.where(self.is_first, now_var, torch.lerp(now_var, var, self.keep))
            self.is_first = torch.zeros_like(self.is_first)
            self.running_mean, self.running_var = mean.detach(), var.detach()
        shape = (-1, *[1] * (x.ndim - 2))
        y = (x - mean.view(shape)) / torch.sqrt(var + self.eps).view(shape)
        if self.weight is None:
            return y
        return y * self.weight.view(shape) + self.bias.view(shape)'''),
    "GroupNormLast": Helper('''class GroupNormLast(nn.GroupNorm):
    """Normalisation of groups with the channels last, as in JAX."""

    def forward(self, x):
        x = x.movedim(-1, 1)
        if not x.requires_grad:  # torch 2.13 crashes in the gradient for such an order in memory
            x = x.contiguous()
        return super().forward(x).movedim(1, -1)'''),
    "GroupNormOfOne": Helper('''class GroupNormOfOne(nn.GroupNorm):
    """Normalisation of groups of one example, without a dimension of the batch."""

    def forward(self, x):
        return super().forward(x[None])[0]'''),
    "Items": Helper('''class Items(nn.Module):
    """A list of arrays and modules."""

    def __init__(self, items):
        super().__init__()
        for i, item in enumerate(items):
            setattr(self, str(i), item)

    def __getitem__(self, i):
        return getattr(self, str(i))'''),
    "Apply": Helper('''class Apply(nn.Module):
    """A function among modules."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)'''),
}  # fmt: skip
