"""What is in an adapter's folder, in words, and whether it can be served: for `lorajax inspect`.

Invariant: the verdict is that of `load_peft` itself, so that it cannot differ from what a server does.
"""

import collections
import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from lorajax.config import ModelConfig
from lorajax.errors import AdapterCapacityError, AdapterFormatError
from lorajax.lora.adapter_folder import TENSORS_NAME, AdapterFolder
from lorajax.lora.peft import load_peft
from lorajax.lora.peft_config import CONFIG_NAME, FIELDS, why_refused
from lorajax.lora.weights import AdapterWeights


class AdapterReport(NamedTuple):
    """text: what the folder holds, ending in the verdict. problem: why it cannot be served, or None."""

    text: str
    problem: str | None


def inspect_adapter(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
    experts: bool = True,
) -> AdapterReport:
    """Describe a PEFT folder. The arguments are those of `load_peft`; nothing is raised for bad files."""
    lines = [f"PEFT adapter {Path(path).name!r}"]
    with contextlib.suppress(AdapterFormatError):
        lines += _describe_config(AdapterFolder(path).read_config())
    with contextlib.suppress(AdapterFormatError):
        lines += _describe_file(AdapterFolder(path))
    warnings: list[str] = []
    problem = None
    try:
        weights = load_peft(
            path,
            config,
            max_rank=max_rank,
            target_modules=target_modules,
            experts=experts,
            warn=warnings.append,
        )
        lines += _describe_weights(weights)
    except (AdapterFormatError, AdapterCapacityError) as error:
        problem = str(error)
    lines += [f"  warning: {text}" for text in warnings]
    against = "checked without a base model" if config is None else f"on {config.name or config.architecture}"
    lines.append(f"cannot be served: {problem}" if problem else f"can be served ({against})")
    return AdapterReport("\n".join(lines), problem)


def _describe_config(fields: dict[str, Any]) -> list[str]:
    """The fields that say something, and what is done with each."""
    lines = [f"  {CONFIG_NAME}"]
    for name, value in fields.items():
        if value in (None, False, "", "none", [], {}) or name == "inference_mode":
            continue
        rule = "refused" if why_refused(name, value) else FIELDS[name].rule
        shown = str(value)
        lines.append(f"    {name:24} {shown if len(shown) <= 80 else shown[:77] + '...'}   ({rule})")
    return lines


def _describe_file(folder: AdapterFolder) -> list[str]:
    with folder.open_tensors() as file:
        dtypes = collections.Counter(entry.dtype.name for entry in file.entries.values())
        num_bytes = sum(entry.end - entry.begin for entry in file.entries.values())
    held = ", ".join(f"{count} {name}" for name, count in sorted(dtypes.items()))
    return [f"  {TENSORS_NAME}", f"    tensors   {held or 'none'}", f"    size      {num_bytes / 1e6:.2f} MB"]


def _describe_weights(weights: AdapterWeights) -> list[str]:
    ranks = collections.Counter(module.rank for module in weights.modules.values())
    scalings = collections.Counter(module.scaling for module in weights.modules.values())
    layers = {int(path.split(".")[1]) for path in weights.modules if path.startswith("layers.")}
    lines = [
        "  adapter",
        f"    modules     {len(weights.modules)}: {', '.join(weights.target_modules)}",
        f"    layers      {_ranges(layers) or 'none'}",
        f"    rank        {_tally(ranks)}",
        f"    scaling     {_tally(scalings)}",
        f"    parameters  {weights.num_parameters:,}",
    ]
    return lines


def _tally(counts: collections.Counter) -> str:
    """One value as it is, several with how often each occurs."""
    if len(counts) == 1:
        return f"{next(iter(counts)):g}"
    return ", ".join(f"{value:g} (×{count})" for value, count in sorted(counts.items()))


def _ranges(numbers: Collection[int]) -> str:
    """{0, 1, 2, 5} → "0-2, 5"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)
