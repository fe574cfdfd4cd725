"""The Ascend target: GE graphs through the real torchair, legal layouts, ordered streams.

`emit_ascend` takes fused phases and gives the files and data of an artifact; see `emit.py`.
Importing this package needs torch and no torch-npu; making a GE graph needs the torch-npu wheel.
"""
