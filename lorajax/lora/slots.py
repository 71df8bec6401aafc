"""Device memory of adapters: for every adapted linear, arrays with one row per slot.

Slot 0 is the base model's: zeros, rank 0, never written. A slot is always written as a whole: modules
that the adapter lacks, layers that it lacks and the padding of its rank become zeros, and the scale is
rewritten, so nothing of the slot's last adapter can remain.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int32

from lorajax.lora.targets import AdapterTarget
from lorajax.lora.weights import AdapterWeights, AnyArray, LoRAModule
from lorajax.pytree import pytree_dataclass

RANK_MULTIPLE = 16  # ranks are padded to what a tensor core multiplies at once


class LoRASlot(nnx.Variable):
    """Holds the `SlotArrays` of one linear. Its own type, so that `nnx.split` parts it from the weights."""


@pytree_dataclass
class SlotArrays:
    """Adapters of one (fused) linear over all layers that share it; one adapter has no `slots` axis.

    a: member m's columns are [m * rank, (m + 1) * rank).
    b: one array per member of a fused projection.
    scale: what a member's update is multiplied with.
    rank: the largest true rank among the members; 0 means that the linear is not adapted.
    """

    a: Float[AnyArray, "layers *slots d_in columns"]
    b: tuple[Float[AnyArray, "layers *slots rank _"], ...]
    scale: Float[AnyArray, "layers *slots members"]
    rank: Int32[AnyArray, "layers *slots"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """How many adapters a model can hold on the device, and how large.

    num_slots: rows of the slot arrays, slot 0 included.
    max_rank: largest rank of an adapter; the arrays are padded to a multiple of 16.
    target_modules: names of the linears to adapt ("q_proj", "lm_head", …); None adapts all.
    dtype: of A and B; None takes the model's.
    """

    num_slots: int
    max_rank: int
    target_modules: frozenset[str] | None = None
    dtype: jnp.dtype | None = None

    @property
    def padded_rank(self) -> int:
        return -(-self.max_rank // RANK_MULTIPLE) * RANK_MULTIPLE


def init_slots(
    config: LoRAConfig, *, num_layers: int, d_in: int, d_outs: tuple[int, ...], dtype: jnp.dtype
) -> LoRASlot:
    """Empty slots of one linear with as many members as `d_outs` has entries."""
    lead, rank, dtype = (num_layers, config.num_slots), config.padded_rank, config.dtype or dtype
    arrays = SlotArrays(
        a=jnp.zeros((*lead, d_in, len(d_outs) * rank), dtype),
        b=tuple(jnp.zeros((*lead, rank, d_out), dtype) for d_out in d_outs),
        scale=jnp.zeros((*lead, len(d_outs)), jnp.float32),
        rank=jnp.zeros(lead, jnp.int32),
    )
    return LoRASlot(arrays)


def pack_adapter(
    weights: AdapterWeights,
    slots: nnx.State,
    targets: Mapping[str, AdapterTarget],
    *,
    xp: ModuleType = np,
) -> nnx.State:
    """Lay an adapter out as one slot of the model: the tree of `slots`, each array without that axis.

    slots: the model's slot state (arrays or shapes). targets: what each path of `weights` binds to.
    xp: `numpy` on the host; `jax.numpy` where the adapter is traced, e.g. differentiated.
    """
    members: dict[str, dict[tuple[int, int], LoRAModule]] = {}
    for path, module in weights.modules.items():
        target = targets[path]
        members.setdefault(target.module, {})[target.layer or 0, target.member] = module

    def pack(key_path: tuple, rows: SlotArrays) -> SlotArrays:
        return _pack_linear(members.pop(_linear_name(key_path), {}), rows, xp)

    packed = jax.tree_util.tree_map_with_path(pack, slots, is_leaf=lambda x: isinstance(x, SlotArrays))
    assert not members, f"the model has no slots for {sorted(members)}"
    return packed


def _linear_name(key_path: tuple) -> str:
    """The path of an `AdapterTarget.module`: layers · self_attn · qkv_proj · slots -> self_attn.qkv_proj."""
    names = [str(key.key) for key in key_path if hasattr(key, "key")]
    return ".".join(name for name in names if name not in ("layers", "slots"))


def _pack_linear(members: dict[tuple[int, int], LoRAModule], rows: SlotArrays, xp: ModuleType) -> SlotArrays:
    num_layers, num_members = rows.scale.shape[0], rows.scale.shape[2]
    rank, dtype = rows.b[0].shape[2], rows.a.dtype
    scale = np.zeros((num_layers, num_members), np.float32)
    true_rank = np.zeros((num_layers,), np.int32)
    for (layer, member), module in members.items():
        scale[layer, member] = module.scaling
        true_rank[layer] = max(true_rank[layer], module.rank)

    def a_of(layer: int, member: int):
        matrix = members[layer, member].a.T if (layer, member) in members else None
        return _padded(matrix, (rows.a.shape[2], rank), dtype, xp)

    def b_of(layer: int, member: int):
        matrix = members[layer, member].b.T if (layer, member) in members else None
        return _padded(matrix, rows.b[member].shape[2:], dtype, xp)

    layers, all_members = range(num_layers), range(num_members)
    return SlotArrays(
        a=xp.stack([xp.concatenate([a_of(i, m) for m in all_members], axis=1) for i in layers]),
        b=tuple(xp.stack([b_of(i, m) for i in layers]) for m in all_members),
        scale=scale,
        rank=true_rank,
    )


def _padded(matrix: AnyArray | None, shape: tuple[int, ...], dtype: jnp.dtype, xp: ModuleType) -> AnyArray:
    """The matrix in the upper left corner of zeros."""
    if matrix is None:
        return xp.zeros(shape, dtype)
    missing = [(0, full - size) for full, size in zip(shape, matrix.shape, strict=True)]
    return xp.pad(matrix.astype(dtype), missing)


def write_slot(slots: nnx.State, adapter: nnx.State, slot: Int32[AnyArray, ""]) -> nnx.State:
    """Overwrite one slot of every array. To be jitted with `slots` donated, so that it is in place."""
    return jax.tree.map(lambda rows, new: rows.at[:, slot].set(new), slots, adapter)
