"""The description of a card and of its link: figures, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that somebody measured, published or assumed.

    Attributes:
        value: the number, in the unit that its name ends with.
        source: who says so.
        assumed: nobody measured it on this hardware; what a datasheet says is an assumption, too.
        cards: of a link, how many cards it was measured with; None where that makes no difference.
    """

    value: float
    source: str
    assumed: bool
    cards: int | None = None

    def is_assumed(self, tp: int) -> bool:
        """Whether it is an assumption for ``tp`` cards: more than were measured."""
        return self.assumed or (self.cards is not None and tp > self.cards)


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of a collective, for links where latency and bandwidth do not tell them.

    Attributes:
        points: by number of ranks, (bytes of what each rank gets, microseconds) by ascending bytes, at least two.
        source: who says so.
        assumed: they were measured on other hardware.
    """

    points: Mapping[int, tuple[tuple[float, float], ...]]
    source: str
    assumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of card, any number of which are linked.

    Attributes:
        name: what the config calls it; `cpu` is a CPU, all others are cards.
        memory_gib: device memory as the runtime sees it, GiB.
        memory_bytes_per_s: bandwidth of the device memory.
        flops_per_s: dense matrix products in the weights' dtype.
        link_bytes_per_s: bus bandwidth of collectives: each rank moves ``2 (w - 1) / w`` of an all-reduce's bytes.
        link_latency_us: time of a collective beside its bytes, microseconds.
        other_link_latencies_us: further values that the latency, if it is assumed, may have.
        all_reduce_us: measured times of all-reduces instead of latency and bandwidth.
        gather_us: the same of the gather of fp32 logits.
        host_step_us, host_seq_us: what a step takes beside the device's bound, and for each sequence in it.
        pool_gib: a fixed size of the pool, where the engine does not size it by the memory.
    """

    name: str
    memory_gib: Figure
    memory_bytes_per_s: Figure
    flops_per_s: Figure
    link_bytes_per_s: Figure
    link_latency_us: Figure
    other_link_latencies_us: tuple[float, ...] = ()
    all_reduce_us: CollectiveTable | None = None
    gather_us: CollectiveTable | None = None
    host_step_us: Figure
    host_seq_us: Figure
    pool_gib: Figure | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU. A fixed pool does not tell: a card may have one, too."""
        return self.name == "cpu"

    def figures(self) -> dict[str, Figure | CollectiveTable]:
        """Every figure that is there, by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Figure | CollectiveTable)}
