"""The CPU target: ONNX by torch's exporter; own ops in domain `hybridge` with portable bodies."""
