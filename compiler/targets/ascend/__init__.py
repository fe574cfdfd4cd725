"""The Ascend target: GE graphs through the real torchair, legal layouts, ordered streams."""
