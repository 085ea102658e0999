"""What an optimized program does, read from its text: its fusions and its collectives."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

# In an optimized program's text: the head of a computation, an instruction, and what in it is told
# apart by name only or says where a value comes from. `S(1)` is where a TPU has it when: in its
# memory on the chip or not, which depends on what else the program does.
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^ +(ROOT )?%([\w.-]+) = (.*)$")
NAME = re.compile(r"%([\w.-]+)")
ASIDE = re.compile(r", (?:metadata|backend_config|frontend_attributes|control-predecessors)=\{.*$")
MEMORY = re.compile(r":?S\(\d+\)")
PARAMETER = re.compile(r"parameter\(\d+\)")
BESIDE = "async_collective_fusion"
IN_ORDER = re.compile(r"/\*index=\d+\*/")
WAITS = re.compile(r'custom_call_target="AsyncCollective(?:Start|Done)"')
CHANNEL = re.compile(r", channel_id=\d+")

# The name of a collective, and of the operation that it is there for, within the whole program's.
PERMUTE = "collective-permute"
COLLECTIVE = re.compile(
    rf" (all-gather|all-reduce|all-to-all|reduce-scatter|{PERMUTE})(?:-start)?\(.*?"
    r'(?:op_name="[^"/]*/?([^"]*)"|$)'
)


# What does not say what a fusion computes: its parameters, and the collective that it is beside.
GIVEN = re.compile(rf" parameter\(|{COLLECTIVE.pattern}")


def collectives(text: str) -> Counter[tuple[str, str]]:
    """The collectives of an optimized program: what they do, and for which operation."""
    found = (COLLECTIVE.search(line) for line in text.splitlines())
    return Counter((one[1], one[2] or "") for one in found if one)


def fusions(text: str) -> Counter[str]:
    """The fusions of an optimized program, as digests of what they compute.

    A value is the digest of its instruction, with its operands' and called computations' in place
    of their names. So neither names and channels count nor the order in which instructions are
    written, nor which parameter of its shape an operand is. Of what a TPU does beside a collective
    only the computation counts, and what begins a collective or waits for it does not: what is done
    at the same time is a matter of the schedule.
    """
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            body = bodies.setdefault(head[1], [])
        elif INSTRUCTION.match(line):
            body.append(line)
    known: dict[str, str] = {}

    def computed(name: str) -> str:
        if name not in known:
            values: dict[str, str] = {}
            mine = set()  # what is neither given to it nor the collective's
            for line in bodies[name]:
                instruction = INSTRUCTION.match(line)
                assert instruction is not None, "as above"
                plain = ASIDE.sub("", instruction[3])
                for aside in (IN_ORDER, MEMORY, CHANNEL):
                    plain = aside.sub("", plain)
                plain = PARAMETER.sub("parameter", plain)
                said = NAME.sub(lambda one: values.get(one[1]) or computed(one[1]), plain)
                values[instruction[2]] = _digest(said)
                if not GIVEN.search(line):
                    mine.add(instruction[2])
                if instruction[1]:
                    gives = [instruction[2]]
                    if " tuple(" in plain:
                        gives = NAME.findall(plain)
                    if name.startswith(BESIDE):
                        gives = [one for one in gives if one in mine]
                    known[name] = _digest(*[values[one] for one in gives])
        return known[name]

    called = re.findall(r" fusion\(.*?\), kind=.*?, calls=%([\w.-]+)", text)
    return Counter(computed(name) for name in called if not any(map(WAITS.search, bodies[name])))


def _digest(*said: str) -> str:
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
