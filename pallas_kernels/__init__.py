"""Pure array functions behind lorajax's layers: gathered-adapter matmuls and paged attention."""

from pallas_kernels.batched_lora.api import batched_lora, lora_expand, lora_shrink
from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["batched_lora", "lora_expand", "lora_shrink", "paged_attention"]
