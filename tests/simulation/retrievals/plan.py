"""Many retrievals of one run: who publishes what, who wants it, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from kvcs.testing.network import Conditions
from tests.simulation.faults import Fault
from tests.simulation.plan import AMPLE, drawn_conditions, drawn_faults

Topology = Literal["none", "one", "chain", "parallel"]
"""No relay: everybody connects to each producer. A chain: consumers are below a relay that is below
the producers' one. In parallel: producers are at both relays."""

End = Literal["finish", "withdraw", "abort", "raise", "cancel", "vanish"]
Engine = Literal["right", "slow", "stuck", "raises", "shape", "dtype"]

PATIENT = 2 * AMPLE
"""Seconds of a deadline that only the bound of recovery comes before."""


@dataclass(frozen=True)
class Model:
    """Geometry, and the blocks of the context that everything is about."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    latent: bool


@dataclass(frozen=True)
class PublicationPlan:
    """One publication, of a producer of its own."""

    name: str
    passes: tuple[int, ...]
    """Blocks of each segment."""

    encodings: tuple[str, ...]
    deterministic: bool
    signed: bool
    sealed: bool
    pad: int | None
    damaged: tuple[tuple[int, int], ...]
    """Layer and block of the context whose Objects its store has spoilt, in the first track."""

    saved: bool
    """Whether HTTP sources have it, once it is whole."""

    start: float
    pause: float
    end: End
    end_after: float

    @property
    def blocks(self) -> int:
        """Blocks of the context."""
        return sum(self.passes)


@dataclass(frozen=True)
class SourcePlan:
    """An HTTP-like source as one reader sees it."""

    delay: float
    fails: float
    """Part of the requests that fail."""

    lacks: float
    """Part of the blocks that are not there."""

    damages: float
    """Part of the blocks that come damaged."""

    @property
    def is_good(self) -> bool:
        """Whether it brings whatever was saved."""
        return not (self.fails or self.lacks or self.damages) and self.delay < 1


@dataclass(frozen=True)
class ReaderPlan:
    """One `kvcs.Subscriber`."""

    host: str
    middles: tuple[int, ...]
    verifies: bool
    """Whether it has the producers' public keys."""

    strange: bool
    """Whether those keys are others'."""

    required: bool
    opens: bool
    """Whether it has the scope's protection keys."""

    recovery: float
    source: SourcePlan | None
    sessions: bool
    """Whether it has sessions; else its source is all."""


@dataclass(frozen=True)
class RetrievalPlan:
    """One retrieval."""

    name: str
    reader: int
    start: float
    deadline: float
    shared: int
    """Blocks of its prompt that are those of the context."""

    own: int
    """Blocks behind them that are its own."""

    named: int | None
    """The publication that it names."""

    retrieve: Literal["auto", "subscribe", "fetch"]
    layers: tuple[int, int] | None
    blocks: int | None
    engine: Engine | None
    wait: float | None
    whole: bool
    """Whether nothing is handed out before all is there."""

    think: float
    leave_after: int | None
    cancel_after: float | None


@dataclass(frozen=True)
class RetrievalsPlan:
    """One run."""

    seed: int
    topology: Topology
    calm: bool
    """Whether nothing happens that a connection does not outlive, and everybody is patient."""

    model: Model
    publications: tuple[PublicationPlan, ...]
    readers: tuple[ReaderPlan, ...]
    retrievals: tuple[RetrievalPlan, ...]
    conditions: dict[str, Conditions] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    cache_octets: int = 1 << 30
    rot: float | None = None
    """When the relays' caches spoil some of what they hold."""

    @property
    def middles(self) -> tuple[str, ...]:
        """Hosts that consumers connect to, and producers, first those of the producers."""
        if self.topology == "none":
            return tuple(each.name for each in self.publications)
        return ("relay",) if self.topology == "one" else ("relay", "relay2")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of consumers."""
        return tuple(dict.fromkeys(each.host for each in self.readers))


def draw(seed: int) -> RetrievalsPlan:
    """The plan of a seed."""
    random = Random(f"retrievals {seed}")
    topology: Topology = random.choice(["none", "one", "one", "chain", "chain", "parallel"])
    calm = random.random() < 0.5
    latent = random.random() < 0.15
    model = Model(
        layers=random.randint(1, 4),
        blocks=random.randint(1, 6),
        block_tokens=random.choice([1, 2, 4]),
        kv_heads=1 if latent else random.randint(1, 2),
        head_dim=random.choice([4, 16, 48]),
        latent=latent,
    )
    signed, sealed = random.random() < 0.25, random.random() < 0.25
    alike = random.random() < 0.6
    publications = tuple(
        _publication(random, f"producer{number}", model, calm, alike, signed, sealed)
        for number in range(random.choice([1, 1, 2, 2, 3]))
    )
    if alike and random.random() < 0.7:
        passes = publications[0].passes
        publications = tuple(_with(each, passes=passes) for each in publications)
    middles = len(publications) if topology == "none" else 1 if topology == "one" else 2
    readers = tuple(
        _reader(random, f"consumer{number % 3}", topology, middles, calm, signed, sealed)
        for number in range(random.randint(2, 4))
    )
    retrievals = tuple(
        _retrieval(random, f"retrieval{number}", model, publications, len(readers), calm)
        for number in range(random.randint(10, 20))
    )
    producers = [each.name for each in publications]
    names = [*producers, *dict.fromkeys(each.host for each in readers)]
    return RetrievalsPlan(
        seed=seed,
        topology=topology,
        calm=calm,
        model=model,
        publications=publications,
        readers=readers,
        retrievals=retrievals,
        conditions={name: drawn_conditions(random) for name in names},
        faults=drawn_faults(random, names, calm),
        cache_octets=1 << 30 if calm or random.random() < 0.7 else random.choice([20_000, 60_000]),
        rot=None if calm or random.random() < 0.7 else random.uniform(0.5, 4.0),
    )


def _with(publication: PublicationPlan, *, passes: tuple[int, ...]) -> PublicationPlan:
    damaged = tuple(each for each in publication.damaged if each[1] < sum(passes))
    return replace(publication, passes=passes, damaged=damaged)


def _publication(
    random: Random,
    name: str,
    model: Model,
    calm: bool,
    alike: bool,
    signed: bool,
    sealed: bool,
) -> PublicationPlan:
    blocks = model.blocks if random.random() < 0.7 else random.randint(1, model.blocks)
    passes = [blocks]
    while passes[-1] > 1 and random.random() < 0.3:
        first = random.randint(1, passes[-1] - 1)
        passes[-1:] = [first, passes[-1] - first]
    deviates = random.random() < 0.08
    is_sealed = sealed is not deviates if random.random() < 0.5 else sealed
    encodings: tuple[str, ...] = ("raw",)
    if not model.latent:
        encodings = random.choice(_ENCODINGS)
    pad = random.choice([None, 2, 4]) if is_sealed and "squeeze" not in str(encodings) else None
    damaged: set[tuple[int, int]] = set()
    if random.random() < 0.35:
        for _ in range(random.randint(1, 3)):
            damaged.add((random.randrange(model.layers), random.randrange(blocks)))
    end: End = random.choice(_CALM_ENDS if calm else _ENDS)
    return PublicationPlan(
        name=name,
        passes=tuple(passes),
        encodings=encodings,
        deterministic=alike and random.random() < 0.9,
        signed=signed is not (deviates and random.random() < 0.5),
        sealed=is_sealed,
        pad=pad,
        damaged=tuple(sorted(damaged)),
        saved=random.random() < 0.7,
        start=random.choice([0.0, 0.0, random.uniform(0, 2)]),
        pause=random.choice([0.0, 0.05, 0.4]),
        end=end,
        end_after=random.random(),
    )


_ENCODINGS: list[tuple[str, ...]] = [
    *[("raw",)] * 5,
    ("kv.raw",),
    ("raw", "kv.raw"),
    ("squeeze",),
    ("kv.squeeze", "raw"),
]
_CALM_ENDS: list[End] = ["finish"] * 9 + ["withdraw"]
_ENDS: list[End] = ["finish"] * 10 + ["withdraw", "abort", "raise", "cancel", "vanish"]


def _reader(
    random: Random,
    host: str,
    topology: Topology,
    middles: int,
    calm: bool,
    signed: bool,
    sealed: bool,
) -> ReaderPlan:
    verifies = random.random() < (0.93 if signed else 0.2)
    source = None
    if random.random() < 0.4:
        good = random.random() < 0.5
        source = SourcePlan(
            delay=random.choice([0.0, 0.05, 0.3] if good else [0.0, 0.3, 1000.0]),
            fails=0.0 if good else random.choice([0.0, 0.2, 1.0]),
            lacks=0.0 if good else random.choice([0.0, 0.3]),
            damages=0.0 if good else random.choice([0.0, 0.3]),
        )
    at: tuple[int, ...] = tuple(range(middles))
    if topology == "chain":
        at = random.choice([(1,), (1,), (1, 0)])
    elif topology == "parallel":
        at = random.choice([(0,), (1,), (0, 1), (1, 0)])
    return ReaderPlan(
        host=host,
        middles=at,
        verifies=verifies,
        strange=verifies and random.random() < 0.05,
        required=verifies and random.random() < (0.5 if signed else 0.1),
        opens=sealed if random.random() < 0.95 else not sealed,
        recovery=AMPLE if calm else random.choice([1.0, 4.0, AMPLE]),
        source=source,
        sessions=source is None or random.random() < 0.93,
    )


def _retrieval(
    random: Random,
    name: str,
    model: Model,
    publications: tuple[PublicationPlan, ...],
    readers: int,
    calm: bool,
) -> RetrievalPlan:
    lengths = [each.passes[0] for each in publications]
    shared = random.choice(lengths) if random.random() < 0.9 else random.randint(1, model.blocks)
    layers = None
    if random.random() < 0.2:
        first = random.randrange(model.layers)
        layers = (first, random.randint(first, model.layers - 1))
    engine: Engine | None = None
    if random.random() < 0.3:
        engine = random.choice(_ENGINES)
    several = any(len(each.passes) > 1 for each in publications)
    return RetrievalPlan(
        name=name,
        reader=random.randrange(readers),
        start=random.choice([0.0, random.uniform(0, 2), random.uniform(0, 6)]),
        deadline=PATIENT if calm else random.choice([PATIENT, random.uniform(0.2, 10.0)]),
        shared=shared,
        own=random.randint(1, 3) if random.random() < 0.1 else 0,
        named=random.randrange(len(publications))
        if random.random() < (0.5 if several else 0.2)
        else None,
        retrieve=random.choice(["auto", "auto", "subscribe", "fetch"]),
        layers=layers,
        blocks=random.randint(1, shared) if random.random() < 0.15 else None,
        engine=engine,
        wait=None if calm or random.random() < 0.8 else random.choice([0.0, 1.0]),
        whole=random.random() < 0.2,
        think=random.choice([0.0, 0.0, 0.2]),
        leave_after=None if random.random() < 0.92 else random.randint(0, 2),
        cancel_after=None if random.random() < 0.92 else random.uniform(0, 5),
    )


_ENGINES: list[Engine] = ["right", "right", "right", "slow", "stuck", "raises", "shape", "dtype"]
