"""hybridge.kernels"""
