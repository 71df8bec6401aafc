"""Which implementation of an op runs where.

"xla" runs everywhere and is the choice on CPUs; "triton" is Pallas on NVIDIA GPUs; "triton-interpret" is
the same kernel in Pallas' interpreter, for tests on a CPU.
"""

from typing import Literal, get_args

import jax

Implementation = Literal["xla", "triton", "triton-interpret"]


def choose(named: str | None, triton_refused: str | None) -> Implementation:
    """The implementation to run.

    named: the caller's wish; None takes Triton on a GPU, or XLA where Triton refuses the shapes.
    triton_refused: why Triton cannot run these shapes; None if it can.
    Raises ValueError with every reason if a named one cannot run.
    """
    platform = jax.default_backend()
    if named is None:
        return "triton" if platform == "gpu" and triton_refused is None else "xla"
    if named not in get_args(Implementation):
        raise ValueError(
            f"implementation is {named!r}; allowed: {', '.join(get_args(Implementation))}, or None"
        )
    reasons = []
    if named == "triton" and platform != "gpu":
        reasons.append(f"it needs an NVIDIA GPU, and JAX runs on {platform!r}")
    if named.startswith("triton") and triton_refused is not None:
        reasons.append(triton_refused)
    if reasons:
        raise ValueError(f"implementation {named!r} cannot run here: {'; '.join(reasons)}")
    return named  # pyright: ignore[reportReturnType]
