"""One decorator for the small structs that travel through `jax.jit`."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Frozen, keyword-only dataclass whose fields are pytree children.

    A field declared with `static_field()` is part of the tree's structure instead: it must be
    hashable, and another value of it is another compiled program.

    Unflattening skips `__init__`: JAX rebuilds trees with leaves that are no arrays (shardings,
    `None`, abstract values), which a runtime shape checker on `__init__` would refuse.
    """
    data = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(data)  # pyright: ignore[reportArgumentType]
    children = [f.name for f in fields if not f.metadata.get("static", False)]
    static = [f.name for f in fields if f.metadata.get("static", False)]

    def flatten_with_keys(self: T):
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in children]
        return keyed, tuple(getattr(self, name) for name in static)

    def unflatten(aux: tuple, leaves) -> T:
        self = object.__new__(data)
        for name, value in [*zip(children, leaves, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten)
    return data


def static_field(**kwargs: Any) -> Any:
    """A field that belongs to the structure of a `pytree_dataclass`, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)
