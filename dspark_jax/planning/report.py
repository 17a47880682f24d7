"""A plan as numbers, as tables and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table

from dspark_jax.parallel import describe_mesh
from dspark_jax.planning.chips import Machine
from dspark_jax.planning.collectives import Sent, Traffic
from dspark_jax.planning.counting import operations, seconds
from dspark_jax.planning.models import AnyMesh
from dspark_jax.planning.program import Program

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step or a round takes of a machine. Bytes are of one device."""

    what: str
    setting: str
    mesh: str
    memory: float  # bytes that a device has
    parts: dict[str, int]  # arrays that stay
    temporary: int | None  # None: nothing compiled it
    traffic: Traffic
    operations: float  # of all devices
    work_seconds: float
    link_seconds: float
    compile_seconds: float
    compiled: bool
    refusal: str = ""
    rate: tuple[str, float] = ("", 0.0)  # what a second makes, and how many of it a step makes
    advice: str = ""
    kernels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        what: str,
        setting: str,
        machine: Machine,
        mesh: AnyMesh,
        parts: dict[str, int],
        programs: Sequence[tuple[int, Program]],
    ) -> "Plan":
        """`programs`: with how often each runs in a step, one after another: the largest temporaries count."""
        chip, sent = machine.chip, {}
        for times, program in programs:
            for kind, one in program.traffic.items():
                sent[kind] = sent.get(kind, Sent()).plus(one, times)
        temporaries = [program.temporary for _, program in programs]
        refusals = [program.refusal for _, program in programs if program.refusal]
        return cls(
            what, setting, describe_mesh(mesh), chip.memory, parts,
            None if None in temporaries else max(temporaries), sent,
            sum(times * operations(program.work) for times, program in programs),
            sum(times * seconds(program.work, chip, mesh.size) for times, program in programs),
            sum(one.bytes for one in sent.values()) / chip.links,
            sum(program.seconds for _, program in programs), machine.compiles, *refusals[:1],
            kernels=tuple(sorted({kernel for _, program in programs for kernel in program.kernels})),
        )  # fmt: skip

    def with_rate(self, unit: str, each: float) -> "Plan":
        return dataclasses.replace(self, rate=(unit, each))

    def with_advice(self, advice: str) -> "Plan":
        return dataclasses.replace(self, advice=advice)

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + (self.temporary or 0)

    @property
    def fits(self) -> bool:
        return not self.refusal and self.total <= self.memory

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.link_seconds

    @property
    def verdict(self) -> str:
        whole = f"{self.total / GIB:.2f} of {self.memory / GIB:.2f} GiB"
        if not self.fits:
            return f"does not fit: {self.refusal or whole}; {self.advice}"
        return f"fits: {whole}" if self.compiled else f"fits: {whole}, temporaries not counted"

    def entries(self) -> dict[str, Any]:
        """As JSON."""
        values = dataclasses.asdict(self) | {"rate": None, "total": self.total, "fits": self.fits}
        values["traffic"] = {kind: one._asdict() for kind, one in self.traffic.items()}
        unit, each = self.rate
        return values | {"seconds": self.seconds, "rate": {"unit": unit, "per_second": each / self.seconds}}


def print_plan(plan: Plan) -> None:
    """The plan as a table and some lines, each number with where it is from."""
    console = rich.console.Console(highlight=False)
    table = rich.table.Table("on each device", "GiB", "from")
    for name, size in plan.parts.items():
        table.add_row(name, f"{size / GIB:.3f}", "shapes")
    known = plan.temporary is not None
    table.add_row(
        "temporaries", f"{plan.temporary / GIB:.3f}" if known else "?", "compiler" if known else "not compiled"
    )
    print(f"\n{plan.what}: {plan.setting} ({plan.mesh})")
    console.print(table)
    print(plan.verdict)
    if plan.refusal:
        return
    if plan.kernels:
        print(f"kernels: {', '.join(plan.kernels)}")
    for kind, sent in plan.traffic.items():
        print(f"{sent.count:.0f} × {kind}, {_bytes(sent.bytes)} sent by each device (compiled)")
    links = f"{_time(plan.link_seconds)} of collectives (compiled)" if plan.compiled else "collectives not known"
    unit, each = plan.rate
    print(f"{_time(plan.seconds)}: {_time(plan.work_seconds)} of products (counted), {links}")
    print(f"{each / plan.seconds:.0f} {unit}")
    if plan.compiled:
        print(f"compiling took {plan.compile_seconds:.0f} s")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
