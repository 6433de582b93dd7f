# SPDX-License-Identifier: Apache-2.0
"""Analysis of Hopper's machine code (SASS): writes to registers that wgmma still reads.

A warp-group product (HGMMA) that takes its left factor from registers reads them after the instruction has been issued,
until a wait (WARPGROUP.DEPBAR). ptxas before CUDA 13.3 gives such registers to others too early in some programs, whose
results then change by chance: https://github.com/triton-lang/triton/issues/9433. Here the code is read as nvdisasm
prints it (-c), along every branch.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*([^;]*);")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"R(\d+)")
_PREDICATE = re.compile(r"!?U?P[T\d]")
_LEFT_OPERAND_REGISTERS = 4
"""Registers of a left factor: 64 rows of 32 bytes, in 128 threads."""
_MAX_BATCHES = 8
"""Those before are taken for one, so that a loop without a wait is followed to an end."""
_WITHOUT_RESULT = re.compile(r"\w*SETP|\w*CHK|R2P|PLOP3|RET|CALL|BRA|BRX|JMP")

RegisterSet = frozenset[int]
"""Registers that products which are waited for together read."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a listing."""

    text: str
    is_predicated: bool
    """Return whether the instruction is predicated."""
    name: str
    operands: tuple[str, ...]

    @property
    def target(self) -> str | None:
        """The label of a branch."""
        match = _TARGET.search(self.operands[-1]) if self.name.startswith(("BRA", "JMP")) else None
        return match[1] if match else None

    @property
    def falls_through(self) -> bool:
        """Whether execution can continue with the next instruction. A branch can have its condition as an operand."""
        return self.is_predicated or len(self.operands) > 1 or self.name not in ("BRA", "JMP", "EXIT")

    @property
    def async_read_registers(self) -> RegisterSet:
        """Registers that are read after the instruction was issued."""
        match = _REGISTER.match(self.operands[1]) if self.name.startswith("HGMMA") else None
        return frozenset(range(int(match[1]), int(match[1]) + _LEFT_OPERAND_REGISTERS)) if match else frozenset()

    @property
    def written_registers(self) -> RegisterSet:
        """Registers of the result."""
        if _WITHOUT_RESULT.match(self.name):
            return frozenset()
        result = next((operand for operand in self.operands if not _PREDICATE.match(operand)), "")
        match = _REGISTER.match(result)
        return frozenset(range(int(match[1]), int(match[1]) + self._width)) if match else frozenset()

    @property
    def _width(self) -> int:
        parts = self.name.split(".")
        if parts[0] == "HGMMA":
            return int(parts[1].split("x")[1]) // 2
        if parts[0] == "HMMA" or "128" in parts or parts[-1] == "4":
            return 4
        wide = {"64", "WIDE", "2"} & set(parts) or (parts[0] == "CS2R" and "32" not in parts)
        return 2 if wide else 1


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a listing, and the position of each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            guard, name, rest = found.groups()
            operands = tuple(operand.strip() for operand in rest.split(",") if operand.strip())
            code.append(Instruction(found[0].strip(), guard is not None, name, operands))
    return code, labels


def hazards(listing: str) -> list[str]:
    """Return the instructions that write to registers which an earlier wgmma may still read."""
    code, labels = parse(listing)
    hazards_by_index: dict[int, str] = {}
    visited: set[tuple[int, tuple[RegisterSet, ...]]] = set()
    pending: list[tuple[int, tuple[RegisterSet, ...]]] = [(0, (frozenset(),))]
    while pending:
        index, batches = state = pending.pop()
        if index >= len(code) or state in visited:
            continue
        visited.add(state)
        instruction = code[index]
        if instruction.written_registers & frozenset().union(*batches):
            hazards_by_index[index] = instruction.text
        if instruction.target is not None:
            pending.append((labels[instruction.target], batches))
        if instruction.falls_through:
            pending.append((index + 1, _batches_after(instruction, batches)))
    return [hazards_by_index[at] for at in sorted(hazards_by_index)]


def _batches_after(instruction: Instruction, batches: tuple[RegisterSet, ...]) -> tuple[RegisterSet, ...]:
    """Batches that are read after an instruction; the last one is not closed yet."""
    *closed, last = batches
    if instruction.name.startswith("HGMMA"):
        last |= instruction.async_read_registers
        if any("gsb" in operand for operand in instruction.operands):
            closed, last = [*closed, last], frozenset()
        if len(closed) > _MAX_BATCHES:
            closed = [closed[0] | closed[1], *closed[2:]]
    elif instruction.name.startswith("WARPGROUP.DEPBAR"):
        closed = closed[max(len(closed) - int(instruction.operands[-1], 16), 0) :]
    return (*closed, last)
