"""Tables that a command writes into a page of the documentation."""

from pathlib import Path

_END = "<!-- end of table -->"


def fill_table(page: Path, command: str, table: str) -> None:
    """Put a table into a page, in place of the one that is there.

    Args:
        page: The page; it marks the place by ``<!-- table: COMMAND -->`` and its end.
        command: What makes the table.
        table: In Markdown.

    Raises:
        ValueError: The page has no such place.
    """
    mark = f"<!-- table: {command} -->"
    before, begun, rest = page.read_text().partition(mark)
    _, ended, after = rest.partition(_END)
    if not begun or not ended:
        raise ValueError(f"{page} expected {mark} and {_END} around its table; put them in")
    page.write_text(f"{before}{mark}\n\n{table}\n\n{_END}{after}")
