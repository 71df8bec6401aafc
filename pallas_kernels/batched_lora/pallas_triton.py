"""The gathered-adapter matmuls as Pallas kernels for NVIDIA GPUs (Triton backend).

`shrink`: one program per block of tokens walks over d_in and keeps the sums of its block in registers.
`expand`: one program per block of tokens and tile of d_out adds scale · (h · B) in place. A block of
slot 0 returns at once; columns of A and rows of B beyond the slot's true rank are masked, so they are never
read. One token per block multiplies and sums; a block of at least 16 uses the tensor cores.

Sources: Punica's BGMV/SGMV (Chen et al. 2023, arXiv:2310.18547) for splitting the update in two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltr
from jaxtyping import Array, Float, Int32

MIN_DOT_ROWS = 16  # smallest tile side of a tensor core


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """d_in: elements of the inner dimension per turn. d_out: columns of the output per program.

    Both are powers of two. num_warps: of one program.
    """

    d_in: int
    d_out: int
    num_warps: int


def block_sizes(d_in: int, d_out: int) -> BlockSizes:
    """Large enough to stream whole cache lines, small enough to stay in registers."""
    return BlockSizes(
        d_in=min(64, pl.next_power_of_2(d_in)), d_out=min(128, pl.next_power_of_2(d_out)), num_warps=4
    )


def why_refused(tokens: int, blocks: int, rank: int) -> str | None:
    """Why these shapes cannot run here; None if they can."""
    block = tokens // blocks
    if block & (block - 1):
        return f"blocks of {block} tokens; allowed: powers of two"
    if rank & (rank - 1) or rank < MIN_DOT_ROWS:
        return f"padded rank {rank}; allowed: powers of two from {MIN_DOT_ROWS}"
    return None


def shrink(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "layers slots d_in columns"],
    slot: Int32[Array, " blocks"],
    rank: Int32[Array, "layers slots"],
    layer: Int32[Array, ""],
    *,
    members: int,
    interpret: bool,
) -> Float[Array, "tokens columns"]:
    """h = x · A of each block's slot, float32; zero beyond the rank of each member and for slot 0."""
    tokens, d_in = x.shape
    blocks, columns = slot.shape[0], a.shape[3]
    sizes = block_sizes(d_in, columns)
    kernel = functools.partial(
        _shrink_kernel, block=tokens // blocks, tile=sizes.d_in, d_in=d_in, width=columns // members
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        grid=(blocks, members),
        compiler_params=pltr.CompilerParams(num_warps=sizes.num_warps),
        interpret=interpret,
        name="lora_shrink",
    )(layer.reshape(1), slot, rank, x, a)


def _shrink_kernel(layer_ref, slot_ref, rank_ref, x_ref, a_ref, h_ref, *, block, tile, d_in, width):
    index, member = pl.program_id(0), pl.program_id(1)
    layer, slot = layer_ref[0], slot_ref[index]
    rows, columns = pl.ds(index * block, block), pl.ds(member * width, width)
    true_rank = jnp.where(slot > 0, rank_ref[layer, slot], 0)
    used = jnp.arange(width, dtype=jnp.int32) < true_rank

    def add_tile(step, total):
        begin = step * tile
        inside = begin + jnp.arange(tile, dtype=jnp.int32) < d_in
        x = pltr.load(x_ref.at[rows, pl.ds(begin, tile)], mask=_both(block, inside), other=0.0)
        mask = jnp.broadcast_to(inside[:, None] & used[None], (tile, width))
        a = pltr.load(a_ref.at[layer, slot, pl.ds(begin, tile), columns], mask=mask, other=0.0)
        return total + _matmul(x, a)

    steps = jnp.where(true_rank > 0, pl.cdiv(d_in, tile), 0)
    total = jax.lax.fori_loop(0, steps, add_tile, jnp.zeros((block, width), jnp.float32))
    h_ref[rows, columns] = total


def expand(
    h: Float[Array, "tokens rank"],
    b: Float[Array, "layers slots rank d_out"],
    slot: Int32[Array, " blocks"],
    scale: Float[Array, "layers slots"],
    y: Float[Array, "tokens d_out"],
    rank: Int32[Array, "layers slots"],
    layer: Int32[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "tokens d_out"]:
    """y + scale · (h · B) of each block's slot, in place of y."""
    tokens, d_out = y.shape
    blocks = slot.shape[0]
    sizes = block_sizes(h.shape[1], d_out)
    kernel = functools.partial(
        _expand_kernel, block=tokens // blocks, tile=sizes.d_out, d_out=d_out, width=h.shape[1]
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(blocks, pl.cdiv(d_out, sizes.d_out)),
        input_output_aliases={6: 0},  # the update is added in place
        compiler_params=pltr.CompilerParams(num_warps=sizes.num_warps),
        interpret=interpret,
        name="lora_expand",
    )(layer.reshape(1), slot, rank, scale, h, b, y)


def _expand_kernel(
    layer_ref, slot_ref, rank_ref, scale_ref, h_ref, b_ref, _, y_ref, *, block, tile, d_out, width
):
    index, column_tile = pl.program_id(0), pl.program_id(1)
    layer, slot = layer_ref[0], slot_ref[index]
    true_rank = jnp.where(slot > 0, rank_ref[layer, slot], 0)

    @pl.when(true_rank > 0)
    def _add():
        rows = pl.ds(index * block, block)
        begin = column_tile * tile
        inside = begin + jnp.arange(tile, dtype=jnp.int32) < d_out
        used = jnp.arange(width, dtype=jnp.int32) < true_rank
        h = pltr.load(h_ref.at[rows, :], mask=_both(block, used), other=0.0) * scale_ref[layer, slot]
        mask = jnp.broadcast_to(used[:, None] & inside[None], (width, tile))
        b = pltr.load(b_ref.at[layer, slot, :, pl.ds(begin, tile)], mask=mask, other=0.0)
        place = y_ref.at[rows, pl.ds(begin, tile)]
        old = pltr.load(place, mask=_both(block, inside), other=0.0)
        new = old.astype(jnp.float32) + _matmul(h, b.astype(jnp.float32))
        pltr.store(place, new.astype(old.dtype), mask=_both(block, inside))


def _both(block: int, columns: jax.Array) -> jax.Array:
    """A mask of all rows of the block and the given columns."""
    return jnp.broadcast_to(columns[None], (block, columns.shape[0]))


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x · w in float32: on the tensor cores where the tile is large enough."""
    if x.shape[0] >= MIN_DOT_ROWS:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return pltr.dot(x, w.astype(x.dtype), precision=precision).astype(jnp.float32)
    return jnp.sum(x.astype(jnp.float32)[:, :, None] * w.astype(jnp.float32)[None], axis=1)


def batched_lora(x, a, b, slot, scale, y, rank, layer, *, interpret: bool):
    """Both, for every member of a fused projection; see `pallas_kernels.batched_lora`."""
    h = shrink(x, a, slot, rank, layer, members=len(y), interpret=interpret)
    width = h.shape[1] // len(y)
    return tuple(
        expand(
            h[:, m * width : (m + 1) * width],
            b[m],
            slot,
            scale[..., m],
            y[m],
            rank,
            layer,
            interpret=interpret,
        )
        for m in range(len(y))
    )
