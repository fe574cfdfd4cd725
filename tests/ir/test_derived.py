"""Recipes of derived weights."""

from __future__ import annotations

import pytest
import torch

from hybridge.artifacts.errors import CompileError
from hybridge.ir.derived import apply_recipe, materialise


def test_recipes_may_build_on_each_other() -> None:
    weights = {"a": torch.ones(3), "b": torch.full((1, 3), 2.0)}
    recipes = {
        "ab": {"transform": "product", "inputs": ["a", "b"], "shape": [3]},
        "both": {"transform": "stack", "inputs": ["ab", "a"]},
        "flat": {"transform": "reshape", "inputs": ["both"], "shape": [6]},
        "joined": {"transform": "concat", "inputs": ["b", "both"], "axis": 0},
    }
    flat = materialise("flat", recipes, weights.__getitem__)
    assert flat.tolist() == [2, 2, 2, 1, 1, 1]
    assert materialise("joined", recipes, weights.__getitem__).shape == (3, 3)


def test_an_unknown_transform_is_named() -> None:
    with pytest.raises(CompileError, match="'fold'"):
        apply_recipe({"transform": "fold", "inputs": []}, [])
