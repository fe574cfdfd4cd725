"""What each op of the vocabulary becomes on Ascend, one file a family of ops."""
