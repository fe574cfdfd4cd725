"""hybridge.artifacts"""
