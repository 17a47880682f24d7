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
    console, how = rich.console.Console(), "compiled" if plan.compiled else "counted"
    title = f"{plan.what}: {plan.setting}; {plan.mesh}"
    table = rich.table.Table("on each device", "GiB", "", title=title, title_justify="left")
    for name, size in plan.parts.items():
        table.add_row(name, _gib(size), "shapes")
    known = plan.temporary is not None
    table.add_row("temporaries", _gib(plan.temporary) if known else "?", "compiled" if known else "not compiled")
    console.print(table)
    console.print(plan.verdict, highlight=False)
    for kind, sent in plan.traffic.items():
        console.print(f"  {sent.count:.0f} × {kind}, {sent.bytes / 1e6:.1f} MB sent (compiled)", highlight=False)
    if plan.refusal:
        return
    unit, each = plan.rate
    work = f"{1e3 * plan.work_seconds:.2f} ms of products (counted)"
    links = (
        f" + {1e3 * plan.link_seconds:.2f} ms of collectives ({how})" if plan.compiled else ", collectives not counted"
    )
    console.print(
        f"{plan.what}: {1e3 * plan.seconds:.2f} ms = {work}{links}, {each / plan.seconds:.0f} {unit}", highlight=False
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"
