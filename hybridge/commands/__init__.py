"""The verbs of the command line, one file each; `console` holds what they share."""
