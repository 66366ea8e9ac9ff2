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
