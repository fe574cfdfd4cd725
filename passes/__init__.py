"""hybridge.passes"""
