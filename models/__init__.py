"""hybridge.models"""
