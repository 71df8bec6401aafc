"""A checkpoint fits its key table exactly, or every misfit is reported at once."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TINY_LLAMA

from lorajax.checkpoints import open_checkpoint
from lorajax.errors import CheckpointError
from lorajax.models.loading import load_weights


class EditedTensors:
    """A checkpoint's tensors with some removed, added or reshaped."""

    def __init__(self, tensors, *, without=(), extra=None):
        self._read = {key: tensors.read(key) for key in tensors.keys() if key not in without}  # noqa: SIM118
        self._read |= extra or {}

    def keys(self):
        return list(self._read)

    def shape(self, name):
        return self._read[name].shape

    def dtype(self, name):
        return self._read[name].dtype

    def read(self, name):
        return self._read[name]

    def read_slice(self, name, index):
        return self._read[name][index]


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(TINY_LLAMA)


def load(checkpoint, **edits):
    return load_weights(
        checkpoint.config, EditedTensors(checkpoint.tensors, **edits), dtype=jnp.dtype("float32")
    )


def test_all_misfits_are_reported_together(checkpoint):
    query, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    with pytest.raises(CheckpointError) as caught:
        load(
            checkpoint,
            without=(norm,),
            extra={
                query: np.zeros((3, 64), np.float32),
                "model.layers.7.mlp.up_proj.weight": np.zeros((96, 64), np.float32),
                "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32),
            },
        )
    message = str(caught.value)
    assert f"{norm}: missing" in message
    assert f"{query}: shape (3, 64), expected (64, 64)" in message
    assert "model.layers.7.mlp.up_proj.weight: the model has 3 layers" in message
    assert "model.layers.0.self_attn.q_proj.bias: not a tensor of this architecture" in message


def test_a_second_copy_of_a_tied_head_and_rope_tables_carry_nothing(checkpoint):
    extra = {
        "lm_head.weight": checkpoint.tensors.read("model.embed_tokens.weight"),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    plain, edited = load(checkpoint), load(checkpoint, extra=extra)
    np.testing.assert_array_equal(plain.embed_tokens.weight[...], edited.embed_tokens.weight[...])


def test_weights_are_cast_once(checkpoint):
    model = load_weights(checkpoint.config, checkpoint.tensors, dtype=jnp.dtype("bfloat16"))
    stored = checkpoint.tensors.read("model.norm.weight")
    np.testing.assert_array_equal(model.norm.weight[...], jnp.asarray(stored, jnp.bfloat16))


def test_progress_counts_to_the_end(checkpoint):
    seen = []
    load_weights(
        checkpoint.config, checkpoint.tensors, dtype=jnp.dtype("float32"), progress=lambda *c: seen.append(c)
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
