"""Figures of the cards that the timed mode can stand for: the makers' data sheets, dense, without sparsity."""

from __future__ import annotations

from dataclasses import asdict, dataclass

NOT_SPEED = ("memory_bytes", "capability")
GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card can do at best."""

    fp32_flops: float
    """per second, without tensor cores"""
    tf32_flops: float
    """per second, float32 matrix products where TF32 is allowed"""
    half_flops: float
    """per second, bfloat16 and float16 matrix products"""
    memory_bandwidth: float
    """bytes per second"""
    memory_bytes: int
    link_bandwidth: float
    """bytes per second in one direction between host and card (PCIe, pinned memory)"""
    capability: tuple[int, int]
    """NVIDIA's compute capability: programs choose number formats by it"""
    link_latency: float = 8e-6
    """seconds for a copy of nothing; an assumption"""
    kernel_seconds: float = 2e-6
    """seconds that the smallest kernel occupies the card; an assumption"""
    graph_kernel_seconds: float = 1.2e-6
    """the same inside a graph; an assumption"""

    def spec(self) -> dict[str, float]:
        """The figures by name, for the extension."""
        return {name: float(value) for name, value in asdict(self).items() if name not in NOT_SPEED}


CARDS = {
    "rtx3060": Card(
        fp32_flops=12.7 * TERA,
        tf32_flops=12.7 * TERA,
        half_flops=25.5 * TERA,
        memory_bandwidth=360 * GB,
        memory_bytes=12 * GB,
        link_bandwidth=24 * GB,
        capability=(8, 6),
    ),
    "rtx4070": Card(
        fp32_flops=29.1 * TERA,
        tf32_flops=29.1 * TERA,
        half_flops=58.3 * TERA,
        memory_bandwidth=504 * GB,
        memory_bytes=12 * GB,
        link_bandwidth=24 * GB,
        capability=(8, 9),
    ),
    "rtx4090": Card(
        fp32_flops=82.6 * TERA,
        tf32_flops=82.6 * TERA,
        half_flops=165.2 * TERA,
        memory_bandwidth=1008 * GB,
        memory_bytes=24 * GB,
        link_bandwidth=24 * GB,
        capability=(8, 9),
    ),
    "t4": Card(
        fp32_flops=8.1 * TERA,
        tf32_flops=8.1 * TERA,
        half_flops=65 * TERA,
        memory_bandwidth=300 * GB,
        memory_bytes=16 * GB,
        link_bandwidth=12 * GB,
        capability=(7, 5),
    ),
    "a100": Card(
        fp32_flops=19.5 * TERA,
        tf32_flops=156 * TERA,
        half_flops=312 * TERA,
        memory_bandwidth=1555 * GB,
        memory_bytes=40 * GB,
        link_bandwidth=24 * GB,
        capability=(8, 0),
    ),
    "h100": Card(
        fp32_flops=67 * TERA,
        tf32_flops=494 * TERA,
        half_flops=989 * TERA,
        memory_bandwidth=3350 * GB,
        memory_bytes=80 * GB,
        link_bandwidth=50 * GB,
        capability=(9, 0),
    ),
}
