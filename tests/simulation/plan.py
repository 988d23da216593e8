"""What one run is: drawn from its seed, all at once, so that it can be printed and repeated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from kvcs.testing.network import Conditions
from tests.simulation.faults import HARMLESS, Fault, FaultKind

Topology = Literal["direct", "relay", "two producers", "two relays"]
End = Literal["finish", "abort", "raise", "cancel", "vanish"]

AMPLE = 60.0
"""Seconds in which a retrieval over a path that only loses and delays is surely complete."""


@dataclass(frozen=True)
class ProducerPlan:
    """One producer."""

    name: str
    content: str
    """Names the content: two producers of the same one make two publications of one prefix."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    latent: bool
    first_segment: int
    """Blocks of segment 0; fewer than `blocks` where the prefill is chunked."""

    start: float
    pause: float
    """Longest pause before a layer."""

    end: End
    end_after: float
    """Part of the layers after which it ends otherwise than by finishing."""


@dataclass(frozen=True)
class ConsumerPlan:
    """One consumer."""

    name: str
    producer: int
    start: float
    deadline: float
    recovery: float
    """Least time for recovery, seconds."""

    retrieve: Literal["auto", "subscribe", "fetch", "raw"]
    """How; "raw" joins one data track by MOQT alone: Next Object, and a fill from the start."""

    layers: tuple[int, int] | None
    blocks: int | None
    think: float
    """Longest pause between two layers."""

    leave_after: int | None
    """Layers after which it leaves."""

    cancel_after: float | None
    """Seconds after which its task is cancelled."""

    middles: tuple[int, ...] = (0,)
    """Which of `Plan.middles` it has sessions with."""


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    quic: Literal["model", "aioquic"]
    topology: Topology
    producers: tuple[ProducerPlan, ...]
    consumers: tuple[ConsumerPlan, ...]
    conditions: dict[str, Conditions] = field(default_factory=dict)
    """Of the path between each host and the middle."""

    faults: tuple[Fault, ...] = ()
    send_buffer: int = 2 << 20
    receive_window: int = 16 << 20
    stream_window: int = 4 << 20
    uni_streams: int = 512
    read_rate: dict[str, float] = field(default_factory=dict)
    """Octets a second that a host's process reads."""

    cache_octets: int = 1 << 30
    retention: float = 3600.0

    @property
    def middles(self) -> tuple[str, ...]:
        """The hosts that producers and consumers connect to."""
        if self.topology == "direct":
            return (self.producers[0].name,)
        return ("relay", "relay2") if self.topology == "two relays" else ("relay",)

    def must_be_complete(self, consumer: ConsumerPlan) -> bool:
        """Whether nothing in the plan excuses a consumer that does not get everything."""
        return (
            min(consumer.deadline, consumer.recovery) >= AMPLE
            and consumer.leave_after is None
            and consumer.cancel_after is None
            and all(self._is_outlived(fault, consumer) for fault in self.faults)
            and all(producer.end == "finish" for producer in self.producers)
            and self.cache_octets >= 1 << 30
        )

    def _is_outlived(self, fault: Fault, consumer: ConsumerPlan) -> bool:
        """Whether a consumer gets everything in spite of a fault."""
        if fault.kind == "kill":
            # Sessions come back, and retrievals go on in the next one; a join by MOQT alone does
            # not, and a publication that was named is asked for once.
            if fault.host.startswith("consumer"):
                return consumer.retrieve != "raw" or fault.host != consumer.name
            producer = self.producers[consumer.producer]
            return consumer.retrieve != "raw" and producer.first_segment == producer.blocks
        return fault.kind in HARMLESS


def draw(seed: int, quic: Literal["model", "aioquic"] | None = None) -> Plan:
    """The plan of a seed; one seed in ten runs on aioquic unless ``quic`` says otherwise."""
    random = Random(f"plan {seed}")
    topology: Topology = random.choice(["direct", "relay", "relay", "two producers", "two relays"])
    alike = random.random() < 0.4
    calm = random.random() < 0.4
    """Whether nobody gives up and nothing breaks: then every consumer must be complete."""
    producers = tuple(
        _producer(random, f"producer{number}", calm)
        for number in range(2 if topology == "two producers" else 1)
    )
    if len(producers) == 2 and alike:
        first, second = producers
        producers = (first, replace(first, name="producer1", start=second.start))
    consumers = tuple(
        _consumer(random, f"consumer{number}", producers, calm)
        for number in range(random.randint(1, 4))
    )
    if topology == "two relays":
        consumers = tuple(
            replace(each, middles=random.choice([(0,), (1,), (0, 1), (1, 0)])) for each in consumers
        )
    names = [each.name for each in (*producers, *consumers)]
    chosen = quic or ("aioquic" if seed % 10 == 9 else "model")
    small = random.random() < 0.3
    return Plan(
        seed=seed,
        quic=chosen,
        topology=topology,
        producers=producers,
        consumers=consumers,
        conditions={name: drawn_conditions(random) for name in names},
        faults=drawn_faults(random, names, calm),
        send_buffer=random.choice([1500, 6000, 30_000]) if small else 2 << 20,
        receive_window=random.choice([4000, 16_000, 64_000]) if small else 16 << 20,
        stream_window=random.choice([2000, 8000]) if small else 4 << 20,
        uni_streams=random.choice([8, 16, 64]) if small else 512,
        read_rate={
            name: random.choice([20e3, 100e3, 1e6]) for name in names if random.random() < 0.15
        },
        cache_octets=1 << 30 if calm or random.random() < 0.7 else random.choice([60_000, 200_000]),
        retention=3600.0 if calm or random.random() < 0.8 else random.uniform(0.5, 5.0),
    )


def _producer(random: Random, name: str, calm: bool) -> ProducerPlan:
    blocks = random.randint(1, 6)
    chunked = blocks > 1 and random.random() < 0.25
    end: End = "finish" if calm else random.choice(["finish"] * 6 + _BAD_ENDS)
    return ProducerPlan(
        name=name,
        content=name,
        layers=random.randint(1, 5),
        blocks=blocks,
        block_tokens=random.choice([1, 2, 4]),
        kv_heads=random.randint(1, 2),
        head_dim=random.choice([4, 16, 64, 200]),
        latent=random.random() < 0.15,
        first_segment=random.randint(1, blocks - 1) if chunked else blocks,
        start=random.choice([0.0, random.uniform(0, 2)]),
        pause=random.choice([0.0, 0.05, 0.5]),
        end=end,
        end_after=random.random(),
    )


_BAD_ENDS: list[End] = ["abort", "raise", "cancel", "vanish"]


def _consumer(
    random: Random, name: str, producers: tuple[ProducerPlan, ...], calm: bool
) -> ConsumerPlan:
    number = random.randrange(len(producers))
    producer = producers[number]
    layers = None
    if random.random() < 0.25:
        first = random.randrange(producer.layers)
        layers = (first, random.randint(first, producer.layers - 1))
    return ConsumerPlan(
        name=name,
        producer=number,
        start=random.choice([0.0, random.uniform(0, 4)]),
        deadline=AMPLE if calm else random.choice([AMPLE, random.uniform(0.2, 8.0)]),
        recovery=AMPLE if calm else random.choice([1.0, AMPLE]),
        retrieve=random.choice(["auto", "auto", "subscribe", "subscribe", "fetch", "raw"]),
        layers=layers,
        blocks=random.randint(1, producer.blocks) if random.random() < 0.2 else None,
        think=random.choice([0.0, 0.0, 0.2]),
        leave_after=None if calm or random.random() < 0.85 else random.randint(0, 3),
        cancel_after=None if calm or random.random() < 0.85 else random.uniform(0, 5),
    )


def drawn_conditions(random: Random) -> Conditions:
    """What the path of a host is like."""
    rough = random.random() < 0.6
    return Conditions(
        delay=random.choice([0.0005, 0.005, 0.03, 0.1]),
        jitter=random.choice([0.0, 0.01]) if rough else 0.0,
        loss=random.choice([0.0, 0.01, 0.05, 0.15]) if rough else 0.0,
        duplicate=random.choice([0.0, 0.05]) if rough else 0.0,
        reorder=random.choice([0.0, 0.1, 0.3]) if rough else 0.0,
        rate=random.choice([None, None, 50e3, 500e3]),
        queue=random.choice([8_000, 64_000, 256_000]),
    )


def drawn_faults(random: Random, names: list[str], calm: bool) -> tuple[Fault, ...]:
    """What goes wrong; only what connections outlive where it is calm."""
    kinds: list[FaultKind] = sorted(HARMLESS)
    if not calm:
        kinds = [*kinds, "long blackout", "sever", "kill", "kill", "restart"]
    count = random.choice([0, 0, 1, 2] if calm else [0, 1, 2, 4])
    return tuple(
        Fault(
            at=random.uniform(0, 5),
            kind=random.choice(kinds),
            host=random.choice(names),
            seconds=random.uniform(0.05, 2.0),
        )
        for _ in range(count)
    )
