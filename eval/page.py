"""Pieces of a report's HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

Summary = dict[str, Any]


def text(value: object) -> str:
    return html.escape(str(value))


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{text(cell)}</td>" for cell in cells) for cells in body)
    return (
        f"<table><tr>{head}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>\n"
    )


def figure(png: bytes, caption: str) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img alt="{text(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def grid(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>\n'


def source(summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    parts = [
        f"<code>{text(summary['command'])}</code>",
        f"commit {text(summary['commit'])}",
        text(versions),
        text(summary["device"]),
    ]
    if "prompts_sha256" in summary:
        parts.append(f"prompts {text(summary['prompts_sha256'][:16])}")
    return f'<p class="source">{"<br>".join(parts)}</p>\n'
