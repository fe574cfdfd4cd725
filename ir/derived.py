"""Weights that passes make from others, as data: computed once, at compile time.

`gm.meta["derived_weights"]` maps a new weight's name to its recipe: a mapping with `transform`, `inputs` (names of
weights, or of weights derived before) and what the transform needs:

    {"transform": "concat", "inputs": [...], "axis": 0}
    {"transform": "reshape", "inputs": [one], "shape": [...]}
    {"transform": "permute", "inputs": [one], "order": [...]}
    {"transform": "slice", "inputs": [one], "axis": 0, "start": 0, "stop": 8}
    {"transform": "exp" or "neg", "inputs": [one]}  elementwise, in fp32
    {"transform": "product", "inputs": [...], "shape": [...]}   elementwise in fp32, each reshaped first
    {"transform": "stack", "inputs": [...]}         along a new first axis
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridge.artifacts.errors import CompileError

Recipe = Mapping[str, Any]


def _product(inputs: list[Tensor], recipe: Recipe) -> Tensor:
    factors = [factor.to(torch.float32).reshape(tuple(recipe["shape"])) for factor in inputs]
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


_TRANSFORMS: dict[str, Callable[[list[Tensor], Recipe], Tensor]] = {
    "concat": lambda inputs, recipe: torch.cat(inputs, dim=recipe["axis"]),
    "reshape": lambda inputs, recipe: inputs[0].reshape(tuple(recipe["shape"])),
    "permute": lambda inputs, recipe: inputs[0].permute(tuple(recipe["order"])),
    "slice": lambda inputs, recipe: inputs[0].narrow(
        recipe["axis"], recipe["start"], recipe["stop"] - recipe["start"]
    ),
    "product": _product,
    "exp": lambda inputs, _: inputs[0].to(torch.float32).exp(),
    "neg": lambda inputs, _: -inputs[0].to(torch.float32),
    "stack": lambda inputs, recipe: torch.stack(inputs),
}

#: Transforms that move values and change none: the result can keep the inputs' dtype.
MOVES = frozenset({"concat", "reshape", "permute", "slice", "stack"})


def apply_recipe(recipe: Recipe, inputs: list[Tensor]) -> Tensor:
    """Compute one derived weight; works on fake and on real tensors.

    Raises:
        CompileError: the recipe's transform is not known.
    """
    transform = _TRANSFORMS.get(recipe["transform"])
    if transform is None:
        known = ", ".join(sorted(_TRANSFORMS))
        raise CompileError(
            f"derived weight: unknown transform {recipe['transform']!r}", f"use one of {known}"
        )
    return transform(inputs, recipe)


def materialise(name: str, recipes: Mapping[str, Recipe], load: Callable[[str], Tensor]) -> Tensor:
    """The value of a weight that may be derived.

    Args:
        name: the weight's name.
        recipes: of all derived weights of the graph.
        load: gives an original weight by name.
    """
    if name not in recipes:
        return load(name)
    recipe = recipes[name]
    inputs = [materialise(each, recipes, load) for each in recipe["inputs"]]
    return apply_recipe(recipe, inputs)
