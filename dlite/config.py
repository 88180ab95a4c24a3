"""`key=value` arguments checked against a dataclass: the command line of every program."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")


def parse(config_class: type[C], argv: Sequence[str]) -> C:
    """The dataclass filled from `key=value` arguments; nested keys are dotted.

    Text is taken as it stands; lists are `a,b`; `null` clears an optional value; the rest is YAML.
    Raises ValueError of one line for an unknown key, a wrong type or a missing value. Choices are
    Enums or checked in `__post_init__` (OmegaConf knows no Literal).
    """
    return from_mapping(config_class, split(argv))


def split(argv: Sequence[str]) -> dict[str, str]:
    values = {}
    for item in argv:
        key, equals, values[key] = item.partition("=")
        if not equals:
            raise ValueError(f"argument {item!r} has no '='; write it as key=value")
    return values


def from_mapping(config_class: type[C], values: Mapping[str, Any]) -> C:
    """As `parse`, from values by their (dotted) key; those that are text are read as there."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    config = OmegaConf.structured(config_class)
    for key, value in values.items():
        try:
            read = _value(_kind(config_class, key), value) if isinstance(value, str) else value
            OmegaConf.update(config, key, read)
        except (ConfigKeyError, AttributeError):
            known = ", ".join(f.name for f in fields(config_class))  # pyright: ignore
            raise ValueError(f"unknown key {key!r}; known keys are {known}") from None
        except OmegaConfBaseException as error:
            raise ValueError(f"'{key}={value}': {str(error).splitlines()[0]}") from None
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{missing[0]} is missing; add {missing[0]}=...")
    return OmegaConf.to_object(config)  # pyright: ignore[reportReturnType]


def run(config_class: type[C], main: Callable[[C], object]) -> None:
    """A program's entry: parses its arguments, prints a ValueError as one line (exit code 2)."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        print(describe(config_class))
        return
    try:
        main(parse(config_class, argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def describe(config_class: type) -> str:
    """What a program takes: its config's docstring, then `key=default` lines."""
    lines = [(config_class.__doc__ or "").strip()]
    for f in fields(config_class):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if isinstance(default, list):
            default = ",".join(map(str, default))
        required = default is MISSING or default == "???"
        lines.append(f"  {f.name}={'(required)' if required else default}")
    return "\n".join(lines)


def _kind(config_class: Any, dotted: str) -> Any:
    """The annotated type of a dotted key; Any below dicts and for keys that do not exist."""
    kind = config_class
    for name in dotted.split("."):
        kind = get_type_hints(kind).get(name, Any) if is_dataclass(kind) else Any
    return kind


def _value(kind: Any, text: str) -> Any:
    from omegaconf import OmegaConf

    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if type(None) in options and text == "null":
        return None
    if str in options:
        return text
    if any(get_origin(option) is list for option in options):
        inner = text.removeprefix("[").removesuffix("]")
        return [part.strip() for part in inner.split(",")] if inner.strip() else []
    return OmegaConf.from_dotlist([f"value={text}"])["value"]
