"""hybridge.compiler"""
