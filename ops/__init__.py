"""hybridge.ops"""
