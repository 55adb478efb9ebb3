"""The cluster part of a spec: devices, links, and the figures that prices are made of."""

# No `annotations` from `__future__`: of texts pydantic compiles each one to know the type.

from itertools import pairwise
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import Field as Rule
from pydantic import model_validator
from titan.compiler.spec.kinds import (
    NONE_WORD,
    TABLE,
    Bandwidth,
    Bytes,
    NonNegative,
    Part,
    Price,
    Rate,
    Reserve,
    Seconds,
    quantity,
    refuse,
    wrong_kind,
)
from titan.compiler.spec.values import Applied, Items, Scalar, Text, describe


class Device(Part):
    """One accelerator: dense peak FLOP/s by dtype (empty when unmeasured) and memory bandwidth in bytes/s."""

    KINDS = ("device",)
    name: str = "device"
    memory: Bytes
    peak: Annotated[dict[Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"], Rate], TABLE] = Rule(
        default_factory=dict
    )
    memory_bandwidth: Bandwidth


class Link(Part):
    """Bytes per second per device in one direction, and the latency of one message."""

    KINDS = ("link",)
    bandwidth: Bandwidth
    latency: Seconds


class Efficiency(Part):
    """A measured or assumed figure of a cluster with where it is from: `measured(0.7, "source")`."""

    KINDS = ("measured",)
    value: NonNegative
    source: str

    @model_validator(mode="before")
    @classmethod
    def _applied(cls, data: Any) -> Any:
        if not isinstance(data, Applied):
            return data
        if data.name not in cls.KINDS:
            raise wrong_kind(data.name, cls.KINDS)
        match data.arguments:
            case (Scalar() as figure, Text() as source):
                return {"value": figure.value, "source": source.value}
        raise refuse("T214", 'a figure is written `measured(0.7, "source")`: a number and a text')


class Curve(Part):
    """Measured seconds by size: `curve([1e3, 1e6], [2e-6, 1e-4], "source")`, sizes rising, as many seconds as sizes."""

    KINDS = ("curve",)
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str

    @model_validator(mode="before")
    @classmethod
    def _applied(cls, data: Any) -> Any:
        if not isinstance(data, Applied):
            return data
        if data.name not in cls.KINDS:
            raise wrong_kind(data.name, cls.KINDS)
        match data.arguments:
            case (Items() as sizes, Items() as seconds, Text() as source):
                numbers = _numbers(sizes), _numbers(seconds)
                return {"sizes": numbers[0], "seconds": numbers[1], "source": source.value}
        raise refuse("T214", 'a curve is written `curve([1e3, 1e6], [2e-6, 1e-4], "source")`: two lists and a text')

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if len(self.sizes) != len(self.seconds) or not self.sizes:
            raise refuse(
                "T214", f"a curve has as many seconds as sizes: here {len(self.seconds)} and {len(self.sizes)}"
            )
        if any(a >= b for a, b in pairwise(self.sizes)):
            a, b = next((a, b) for a, b in pairwise(self.sizes) if a >= b)
            raise refuse("T214", f"sizes of a curve rise: here {b:g} follows {a:g}")
        if not all(0 < number < inf for number in (*self.sizes, *self.seconds)):
            raise refuse("T214", "sizes and seconds of a curve are positive numbers")
        return self


def _numbers(given: Items) -> tuple[float, ...]:
    for item in given.items:
        if not isinstance(item, Scalar) or item.dimension not in ("", "seconds", "bytes"):
            raise refuse("T214", f"a curve is made of numbers, not {describe(item)}")
    return tuple(float(item.value) for item in given.items if isinstance(item, Scalar))


class Cluster(Part):
    """Equal nodes of equal devices. `memory_reserved` is what driver, context and libraries take of each device;
    `host_memory` what a node's devices may take together of its own memory, over a `host_link` each. The devices of a
    node may share `cores` (processes on CPUs); 0: each computes by itself."""

    KINDS = ("cluster",)
    name: str = "cluster"
    nodes: Annotated[int, Rule(gt=0, le=2**20), quantity("")] = 1
    devices_per_node: Annotated[int, Rule(gt=0, le=2**12), quantity("")]
    device: Device
    intra: Link
    inter: Link
    host_memory: Annotated[Bytes | None, NONE_WORD] = None
    host_link: Annotated[Link | None, NONE_WORD] = None
    price_per_device_hour: Annotated[Price | None, NONE_WORD] = None
    memory_reserved: Reserve = 0
    efficiency: Annotated[dict[str, Efficiency], TABLE] = Rule(default_factory=dict)
    cores: Annotated[int, Rule(ge=0, le=2**12), quantity("")] = 0
    curves: Annotated[dict[str, Curve], TABLE] = Rule(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        """Host memory of one device, 0 where nothing is said about it or the way there."""
        return int(self.host_memory / self.devices_per_node) if self.host_memory and self.host_link else 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node
