"""The forms in which an agent writes a file that it has read: other text, so other tokens.

AgSpec indexes a file as it is and with each line behind a space or a minus (unified diffs), and
escaped for scaffolds that write whole files in a tool call. De-numbering is ours: a file that was
read with line numbers is written without them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence

NUMBERED = re.compile(r"[ \t]*(\d+)[\t|:→ ]")
NUMBERED_SHARE = 0.5  # of the lines that aren't blank; tools put notes between the numbered ones


def denumber(text: str) -> str:
    """The text without its line numbers; unchanged where it has none.

    A column of rising numbers is one of line numbers only where most of them rise by one.
    """
    lines = text.splitlines(keepends=True)
    found = [NUMBERED.match(line) or NUMBERED.match(line.rstrip("\r\n") + " ") for line in lines]
    numbers = [int(match[1]) for match in found if match]
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    num_written = sum(not line.isspace() for line in lines)
    if len(numbers) < max(2, NUMBERED_SHARE * num_written) or 2 * steps.count(1) < len(steps):
        return text
    return "".join(
        line[min(match.end(), len(line.rstrip("\r\n"))) :] if match else line
        for line, match in zip(lines, found, strict=True)
    )


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _behind(mark: str) -> Callable[[str], str]:
    return lambda text: "".join(mark + line for line in text.splitlines(keepends=True))


FORMS: dict[str, Callable[[str], str]] = {
    "full": lambda text: text,
    "json": escaped,
    "space": _behind(" "),
    "minus": _behind("-"),
    "plus": _behind("+"),
}
DENUMBER = "denumber"  # applied before every other form
DEFAULT_FORMS = ("full", "json", DENUMBER)  # diffs' forms gain nothing where nobody emits diffs


def check_forms(forms: Sequence[str]) -> None:
    unknown = [form for form in forms if form not in FORMS and form != DENUMBER]
    if unknown:
        known = ", ".join([*FORMS, DENUMBER])
        raise ValueError(f"unknown emission form {unknown[0]!r}; choose from {known}")


def renderings(text: str, forms: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(form, the text in it) for each of `forms`."""
    plain = denumber(text) if DENUMBER in forms else text
    for form in forms:
        if form != DENUMBER:
            yield form, FORMS[form](plain)
