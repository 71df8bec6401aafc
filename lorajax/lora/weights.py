"""One adapter's arrays: `AdapterWeights`, low-rank factors keyed by the module that they adapt.

Invariant: an `AdapterWeights` is complete. Every entry is a whole pair of factors of equal rank with
its scaling; nothing of it has to be looked up elsewhere, and nothing of what was read was left out.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from lorajax.config import ModelConfig
from lorajax.pytree import pytree_dataclass, static_field

AnyArray = jax.Array | np.ndarray


class AdapterWarning(UserWarning):
    """Something about an adapter that its user should know, though it can be served."""


@pytree_dataclass
class LoRAModule:
    """The update of one linear map, y += scaling · (x · aᵀ) · bᵀ, as PEFT orients the factors.

    For an embedding the map is that of one-hot rows: `d_in` is the vocabulary, `d_out` the width.
    """

    a: Float[AnyArray, "rank d_in"]
    b: Float[AnyArray, "d_out rank"]
    scaling: float = static_field()  # pyright: ignore[reportAssignmentType]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def delta(self) -> Float[AnyArray, "d_out d_in"]:
        """The update as a full matrix, scaling · b · a, in the dtype of the factors."""
        return self.scaling * (self.b @ self.a)


@pytree_dataclass
class AdapterWeights:
    """An adapter as a pytree: its leaves are the factors, its structure the module names and scalings.

    modules: canonical path → factors. The path is the module's Hugging Face name without `model.`:
        "layers.0.self_attn.q_proj", "layers.3.mlp.experts.5.gate_proj", "embed_tokens", "lm_head".

    Leaves are read-only numpy arrays when read from a file, and whatever they were when they came
    from a training state. `jax.grad` with respect to an `AdapterWeights` gives an `AdapterWeights`.
    """

    modules: dict[str, LoRAModule]

    @property
    def rank(self) -> int:
        """The largest rank among the modules."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def num_parameters(self) -> int:
        return sum(module.a.size + module.b.size for module in self.modules.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Sorted names of the adapted kinds of linears: ("down_proj", "q_proj")."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.modules}))

    @classmethod
    def from_pytree(
        cls,
        tree: Any,
        rank: int | None = None,
        alpha: int | float | None = None,
        *,
        use_rslora: bool = False,
        config: ModelConfig | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> "AdapterWeights":
        """An adapter from the arrays of a live training state, with no file in between.

        tree: Flax NNX or Linen LoRA factors (`lora_a` [d_in, r], `lora_b` [r, d_out]; also as Dense
            kernels), qwix factors (`kernel_lora_a`, `kernel_lora_b`), a PEFT state dict (`lora_A.weight`
            [r, d_in]), each nested or flat, by layer or stacked; or an `AdapterWeights`. The layouts are
            spelled out in `lorajax.lora.training_state`; anything else is refused.
        rank: checked against every module if given. alpha: of the scaling alpha / r (alpha / sqrt(r)
            with `use_rslora`); the Flax layout without alpha scales by 1, as `nnx.LoRA` computes.
        config: the base model, to check paths and shapes. rename: module names → Hugging Face's.

        Raises AdapterFormatError.
        """
        from lorajax.lora.training_state import read_pytree  # it builds this class

        return read_pytree(tree, rank, alpha, use_rslora=use_rslora, config=config, rename=rename)

    def save_peft(self, folder: str | Path, *, base_model_name: str = "") -> None:
        """Write a folder that PEFT loads; see `lorajax.lora.peft_save`."""
        from lorajax.lora.peft_save import save_peft  # it reads this class

        save_peft(self, folder, base_model_name=base_model_name)

    def save_orbax(self, folder: str | Path) -> None:
        """Write an Orbax checkpoint; see `lorajax.lora.orbax_adapter`."""
        from lorajax.lora.orbax_adapter import save_orbax  # it reads this class

        save_orbax(self, folder)

    @classmethod
    def load_orbax(
        cls,
        folder: str | Path,
        rank: int | None = None,
        alpha: int | float | None = None,
        *,
        use_rslora: bool = False,
        config: ModelConfig | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> "AdapterWeights":
        """Read what `save_orbax` wrote, or a training state; see `lorajax.lora.orbax_adapter`."""
        from lorajax.lora.orbax_adapter import load_orbax  # it builds this class

        return load_orbax(folder, rank, alpha, use_rslora=use_rslora, config=config, rename=rename)


def sample_names(names: Iterable[str], limit: int = 3) -> str:
    """The first few names of a list that may be long, for an error message."""
    shown = sorted(names)
    rest = len(shown) - limit
    listed = ", ".join(repr(name[:120]) for name in shown[:limit]) or "none"
    return f"{listed} and {rest} more" if rest > 0 else listed
