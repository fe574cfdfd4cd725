"""hybridge.ir"""
