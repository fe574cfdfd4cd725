"""The lowered graphs of tests/passes, loaded by path: test folders are packages of their own."""

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[3] / "passes" / "lowered_graphs.py"
_spec = importlib.util.spec_from_file_location("lowered_graphs_of_passes", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
MACHINE, experts, indexer_prolog = _module.MACHINE, _module.experts, _module.indexer_prolog
spread_experts = _module.spread_experts
