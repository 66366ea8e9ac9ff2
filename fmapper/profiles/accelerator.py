"""Data sheets of accelerators, and the share of their peaks that programs reach."""

from __future__ import annotations

from dataclasses import dataclass, field

Range = tuple[float, float, float]
"""The lowest, the likely and the highest value."""

_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}  # 16 lanes, one direction, net of line coding


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The facts about an accelerator that predictions use: peaks, achieved shares, fixed costs.

    The peaks are those of the data sheet, without sparsity. The shares and costs are ranges of what
    programs are known to reach. On an accelerator that is present, they are measured instead.

    Attributes:
        name: The manufacturer's name.
        flops: Operations per second by dtype, at the frameworks' default precision.
        memory: Bytes per second of its own memory.
        link: Bytes per second between it and the host, in one direction.
        source: The source of the peaks.
        compute_share: The share of `flops` that is reached.
        memory_share: The share of `memory` that is reached.
        link_share: The share of `link` that is reached from pageable memory, such as NumPy's.
        launch: Seconds between two kernels that Python launches.
        compiled_launch: Seconds between two kernels of a compiled program.
        compiled_call: Seconds to start a compiled program.
        copy: Seconds that a copy over the link takes in addition to its bytes.
        sync: Seconds to wait for a value.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    memory: float
    link: float
    source: str = ""
    compute_share: Range = (0.15, 0.4, 0.8)
    memory_share: Range = (0.4, 0.65, 0.9)
    # The highest share is for pinned buffers, 52 to 56 of 63 GB/s; others reach far less.
    link_share: Range = (0.15, 0.4, 0.88)
    # The driver and the launch itself take four to six microseconds; the rest is dispatch.
    launch: Range = (5e-6, 7e-6, 10e-6)
    compiled_launch: Range = (1.5e-6, 3e-6, 6e-6)
    compiled_call: Range = (10e-6, 25e-6, 80e-6)
    copy: Range = (6e-6, 12e-6, 25e-6)
    sync: Range = (8e-6, 15e-6, 40e-6)

    def peak(self, dtype: str) -> float:
        """Returns operations per second in a dtype; an unlisted one counts as float32."""
        return self.flops.get(dtype, self.flops["float32"])


def _gpu(name: str, tflops: tuple[float, float, float], memory: float, pcie: int) -> Accelerator:
    """Makes an accelerator from its data sheet: TFLOP/s at 32, 16 and 64 bits, and GB/s."""
    single, half, double = (1e12 * peak for peak in tflops)
    flops = {"float32": single, "float16": half, "bfloat16": half, "float64": double}
    page = name.split()[1].lower()
    source = f"https://www.nvidia.com/en-us/data-center/{'tesla-t4' if page == 't4' else page}"
    return Accelerator(name, flops, memory * 1e9, _PCIE[pcie], source)


# Values for 32 bits are without tensor cores: matrix products use TF32 only if it is enabled.
ACCELERATORS = {
    "H200": _gpu("NVIDIA H200 SXM", (67, 989, 34), 4800, 5),
    "H100": _gpu("NVIDIA H100 SXM", (67, 989, 34), 3350, 5),
    "A100": _gpu("NVIDIA A100 SXM 80GB", (19.5, 312, 9.7), 2039, 4),
    "L4": _gpu("NVIDIA L4", (30.3, 121, 0.47), 300, 4),
    "V100": _gpu("NVIDIA V100 SXM2", (15.7, 125, 7.8), 900, 3),
    "T4": _gpu("NVIDIA T4", (8.1, 65, 0.25), 300, 3),
}


def find_accelerator(wanted: str | Accelerator) -> Accelerator:
    """Returns an accelerator by its short name, in any case.

    Raises:
        ValueError: The table has no such name.

    Examples:
        >>> find_accelerator("t4").name
        'NVIDIA T4'
    """
    if isinstance(wanted, Accelerator):
        return wanted
    accelerator = ACCELERATORS.get(wanted.upper())
    if accelerator is None:
        raise ValueError(
            f"accelerator={wanted!r} is not in the table. Known: {', '.join(ACCELERATORS)}. "
            "For another one, pass a fmapper.Accelerator with its data sheet."
        )
    return accelerator
