"""Plain aligned text tables."""


def table(rows: list[tuple[str, ...]]) -> str:
    """Plain text columns; the first row is the heading, a column of numbers (or `-`) is aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [
        all((_is_number(cell) or cell == "-") for cell in column[1:]) and any(map(_is_number, column[1:]))
        for column in zip(*rows, strict=True)
    ]
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()
