"""hybridge.runner"""
