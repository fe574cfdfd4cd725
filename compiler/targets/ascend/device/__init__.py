"""An Ascend artifact on a machine with an NPU: loaded, compiled there, compared with golden values, timed.

Everything but the calls into torch-npu and CANN (`npu.py`) is behind the small interface of
`device.py`, so that it can be run on any machine.
"""
