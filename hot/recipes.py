"""Results that need not be kept: those that an op can make again of codes that it keeps anyway.

Found, as in `hot.sharing`, by the identity of the result, held by a weak reference, and by its version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

Make: TypeAlias = Callable[[tuple[Tensor, ...]], Tensor]


class Recipe(NamedTuple):
    """make(tensors) is the result again, of its shape and dtype, as the codes have it; rectified(tensors), where there is one,
    what a ReLU makes of it."""

    tensors: tuple[Tensor, ...]
    make: Make
    rectified: Make | None = None


_recipes: dict[int, tuple[weakref.ref[Tensor], int, Recipe]] = {}


def remember(y: Tensor, tensors: tuple[Tensor, ...], make: Make, rectified: Make | None = None) -> None:
    """Say how y is made again, for as long as somebody holds it and does not change it."""
    slot = id(y)
    recipe = Recipe(tensors, make, rectified)
    _recipes[slot] = weakref.ref(y, lambda _: _recipes.pop(slot, None)), y._version, recipe


def recipe_of(y: Tensor) -> Recipe | None:
    """How y is made again, if anybody said so and it was not changed since."""
    entry = _recipes.get(id(y))
    return entry[2] if entry is not None and entry[0]() is y and entry[1] == y._version else None
