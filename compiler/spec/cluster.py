"""The cluster part of a spec: devices, links, and the figures that prices are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
from titan.compiler.spec.values import Applied, Scalar, Text


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


class Cluster(Part):
    """Equal nodes of equal devices. `memory_reserved` is what driver, context and libraries take of each device."""

    KINDS = ("cluster",)
    name: str = "cluster"
    nodes: Annotated[int, Rule(gt=0, le=2**20), quantity("")] = 1
    devices_per_node: Annotated[int, Rule(gt=0, le=2**12), quantity("")]
    device: Device
    intra: Link
    inter: Link
    price_per_device_hour: Annotated[Price | None, NONE_WORD] = None
    memory_reserved: Reserve = 0
    efficiency: Annotated[dict[str, Efficiency], TABLE] = Rule(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node
