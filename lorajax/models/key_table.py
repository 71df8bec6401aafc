"""Checkpoint tensors → model arrays, as a table.

A rule says where one Hugging Face tensor stands in the model: the array's path, the shape that the
tensor takes there, and the region of the array that it fills. `{layer}` in a key is the index of the
array's leading `layers` axis. Every checkpoint key must match exactly one rule, and the rules together
must fill every array.
"""

import dataclasses
import re

Region = tuple[slice | int, ...]
ALL: Region = (slice(None),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyRule:
    """One row of the table.

    key: Hugging Face name, e.g. "model.layers.{layer}.self_attn.k_proj.weight".
    path: of the array in the model, e.g. "layers.self_attn.qkv_proj.weight"; None for a tensor that
        carries nothing (a stored rope table, a second copy of a tied head).
    shape: of the tensor in the checkpoint.
    view: shape that the tensor takes in the model, where it differs.
    region: the part of the array (after its layers axis) that it fills.
    """

    key: str
    path: str | None
    shape: tuple[int, ...] = ()
    view: tuple[int, ...] | None = None
    region: Region = ALL

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.key).replace(r"\{layer\}", r"(?P<layer>\d+)") + r"\Z")

    def layer_of(self, key: str) -> int | None:
        """The layer that the key names; None for a tensor that stands once in the model."""
        found = self.pattern.match(key)
        assert found is not None
        return int(found["layer"]) if "layer" in found.groupdict() else None


KeyTable = tuple[KeyRule, ...]
