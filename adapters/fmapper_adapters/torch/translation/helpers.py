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
        if self.pad is not None:
            x = F.pad(x, self.pad)
        return super().forward(x).movedim(1, -1)'''
_CHANNELS = '''class {name}(nn.{base}):
    """{what} with the channels last, as in JAX."""

    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)'''

_PADDED = ("Conv1d", "Conv2d", "Conv3d")

HELPERS = {
    f"{name}Last": Helper(
        (_CONV if name in _PADDED else _CHANNELS).format(name=f"{name}Last", base=name, what=what)
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
        "GroupNorm": "Normalisation of groups",
    }.items()
} | {
    "check_shapes": Helper(CHECK_SHAPES),
    "check": Helper('''def check(condition, message):
    """Raises where a condition does not hold."""
    if not condition:
        raise ValueError(message)'''),
    "Apply": Helper('''class Apply(nn.Module):
    """A function among modules."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)'''),
}  # fmt: skip
