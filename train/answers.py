"""A JSONL file of answers that a kill at any moment neither tears, loses rows of, nor doubles."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


class AnswerFile:
    """Rows keyed by `id`, each on disk before the next; opening it again goes on behind them.

    Beside it, FILE.settings.json says how the rows were made. Raises ValueError when the rows there
    were made with other settings, when a line other than a torn last one is broken, and when
    another process writes the file.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], *, overwrite: bool) -> None:
        self.path = Path(path)
        self.settings_path = self.path.with_name(f"{self.path.name}.settings.json")
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(
                f"another process is writing {self.path}; wait for it or use another out="
            ) from None
        try:
            if overwrite:
                self._file.truncate(0)
            self.ids = self._read_ids()
            if self.ids:
                self._check(settings)
            self._write_settings(settings)
        except ValueError:
            self._file.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        assert row["id"] not in self.ids, row["id"]
        self._file.write(
            json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        )
        self._file.flush()
        os.fsync(self._file.fileno())
        self.ids.add(row["id"])

    def close(self) -> None:
        self._file.close()

    def _read_ids(self) -> set[str]:
        """Ids of the rows there. A last line without newline was being written: it is dropped."""
        self._file.seek(0)
        ids: set[str] = set()
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                name = json.loads(line)["id"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"line {number} of {self.path} is no answer row; mend it or use overwrite=true"
                ) from None
            if name in ids:
                raise ValueError(
                    f"{self.path} has two rows of id {name!r}; remove one or use overwrite=true"
                )
            ids.add(name)
            end += len(line)
        self._file.truncate(end)
        return ids

    def _check(self, settings: dict[str, Any]) -> None:
        remedy = "use another out=, the same settings, or overwrite=true"
        if not self.settings_path.is_file():
            raise ValueError(
                f"{self.path} has rows, but {self.settings_path.name}, which says how they were "
                f"made, is missing; {remedy}"
            )
        made_with = json.loads(self.settings_path.read_text())
        other = {k for k in {*made_with, *settings} if made_with.get(k) != settings.get(k)}
        if other:
            then, now = (
                ", ".join(f"{k}={values[k]}" for k in sorted(other & values.keys()))
                for values in (made_with, settings)
            )
            raise ValueError(f"{self.path} was made with {then}, this run has {now}; {remedy}")

    def _write_settings(self, settings: dict[str, Any]) -> None:
        new = self.settings_path.with_name(f"{self.settings_path.name}.new")
        new.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        os.replace(new, self.settings_path)
