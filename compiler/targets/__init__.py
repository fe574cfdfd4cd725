"""Targets: each lowers a compiled graph to the form that one kind of machine loads."""
