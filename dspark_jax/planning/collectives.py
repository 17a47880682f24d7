"""What devices send one another, read from a compiled program's text: loops as often as they run."""

import collections
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
# A loop that counts up from 0, as a scan does, ends where its counter reaches a constant.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')  # as some compilers say it; TPU's does not
_END = re.compile(r"ROOT .* compare\([^,]*?%[\w.\-]+, [^,]*?%([\w.\-]+)\), direction=LT")
# Who takes part together: lists of devices, a grid of them, or some axes of a mesh.
_LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GRID = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")
# TPU's compiler writes a collective into all fusions that run beside it, a chain from its start to its end.
_CHAINED, _STARTS = "chain_id=", 'custom_call_target="AsyncCollectiveStart"'


class Sent(NamedTuple):
    """Collectives of one kind: how many, and the bytes that one device sends for them as rings do it."""

    count: float = 0
    bytes: float = 0

    def plus(self, other: "Sent", times: float = 1) -> "Sent":
        return Sent(self.count + times * other.count, self.bytes + times * other.bytes)


Traffic = dict[str, Sent]  # by kind


def traffic(hlo: str, devices: int, loops: Sequence[float] = ()) -> Traffic:
    """The collectives of a program. `loops`: as in `counting.products`; of branches the busiest counts."""
    lines, entry = _computations(hlo)
    return _of(entry, lines, devices, tuple(loops)) if entry else {}


def sent_bytes(hlo: str, devices: int) -> float:
    """Bytes that a device sends for the collectives of a text, each line once."""
    return sum(one.bytes for line in hlo.splitlines() if (one := _collective(line, devices)[1]))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by its name, and the name of the one that is run."""
    lines: dict[str, list[str]] = collections.defaultdict(list)
    entry = name = ""
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[2]
            entry = name if header[1] else entry
        elif name:
            lines[name].append(line)
    return lines, entry


def _of(name: str, lines: dict[str, list[str]], devices: int, loops: tuple[float, ...]) -> Traffic:
    total: Traffic = {}

    def add(found: Traffic, times: float = 1) -> None:
        for kind, sent in found.items():
            total[kind] = total.get(kind, Sent()).plus(sent, times)

    starts = any(_STARTS in line for line in lines.get(name, ()))
    for line in lines.get(name, ()):
        kind, sent = _collective(line, devices)
        if sent and _CHAINED in line and not starts:
            continue
        if sent:
            add({kind: sent})
            continue  # what it calls adds two numbers
        times, inner = _loop(line, lines, loops)
        for called in _CALLED.findall(line):
            add(_of(called, lines, devices, inner), times)
        branches = [n.strip(" %") for many, one in _BRANCHES.findall(line) for n in (many or one).split(",")]
        if branches:
            add(max((_of(b, lines, devices, loops) for b in branches), key=_bytes_of))
    return total


def _bytes_of(found: Traffic) -> float:
    return sum(sent.bytes for sent in found.values())


def _loop(line: str, lines: dict[str, list[str]], loops: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """How often what a line calls runs, and what is left for the loops in it."""
    condition = _CONDITION.search(line)
    if not condition:
        return 1, loops
    text = "\n".join(lines.get(condition[1], ()))
    end = _END.search(text)
    known = _TRIPS.search(line) or end and re.search(rf"%{re.escape(end[1])} = .*? constant\((\d+)\)", text)
    return (int(known[1]), loops) if known else (loops[0] if loops else 1, loops[1:])


def _collective(line: str, devices: int) -> tuple[str, Sent | None]:
    found = _COLLECTIVE.search(line)
    if not found:
        return "", None
    sizes = [_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(found[1])]
    started, kind = "-start(" in line, found[2]
    # An operation that is started gives its operand too; several arrays may go together.
    size = max(sizes, default=0) if started else sum(sizes)
    group = _group(line) or devices
    share = {"all-reduce": 2 * (group - 1) / group, "reduce-scatter": group - 1, "collective-permute": 1}
    return kind, Sent(1, size * share.get(kind, (group - 1) / group))


def _group(line: str) -> int:
    """Devices that take part in one collective together; 0: it does not say."""
    lists, grid, axes = (form.search(line) for form in (_LISTS, _GRID, _AXES))
    if axes:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']*)'", axes[2]))
    return int(grid[1]) if grid else len(lists[1].split(",")) if lists else 0


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.match(r"[a-z]+(\d+)", dtype)[1])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8
