"""Whether the first line of a text table names its columns. Doubt is an error, never a guess."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

from cimage_dist.errors import UserError

Lines = Sequence[Sequence[str]]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def looks_numbered(line: Sequence[str]) -> bool:
    """Whether a line is 0, 1, 2, ...: the names pandas gives to columns without names."""
    return list(line) == [str(i) for i in range(len(line))]


def has_header(lines: Lines, known: Collection[str]) -> bool | None:
    """From the first lines; None: they leave it open. `known` are names a header might use."""
    first, rest = lines[0], lines[1:]
    if any(cell.lower() in known for cell in first if cell):
        return True
    if first[0] == "" and len(first) > 1 and looks_numbered(first[1:]):
        return True  # pandas wrote its index too
    columns = [[line[j] for line in rest if line[j]] for j in range(len(first))]
    numeric = [bool(cells) and all(map(is_number, cells)) for cells in columns]
    if any(
        cell and not is_number(cell) and all_numbers
        for cell, all_numbers in zip(first, numeric, strict=True)
    ):
        return True
    # Columns of text (ids, class names) say nothing; those of numbers do.
    cells = [cell for cell, numbers in zip(first, numeric, strict=True) if numbers] or first
    if not all(is_number(cell) for cell in cells if cell):
        return None
    named = sum(1 for _ in takewhile(lambda cell: not is_number(cell), first))
    if not looks_numbered(first[named:]):
        return False
    # Whole numbers over a column of fractions: 0,1,2 is then no row of the table.
    has_fractions = any(found and not any(map(_is_whole, found)) for found in columns)
    return True if has_fractions and len(cells) > 2 else None


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdigit()


def show(lines: Lines) -> str:
    return " | ".join(",".join(line) for line in lines[:3])


def doubt(path: Path, lines: Lines, role: str) -> UserError:
    return UserError(
        f"{path}: the first line may name the columns or be data. First lines: {show(lines)}. Say "
        f"which: data.header.{role}=present or data.header.{role}=absent."
    )
