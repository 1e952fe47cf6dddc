"""With which codes the command and the programs beside it end."""

FINE = 0

FAILED = 1
"""Something is wrong: a number is off, a check failed, a kernel raised."""

MISUSED = 2
"""What was asked for isn't there or can't be used; what to do about it was printed."""

NOTHING_RUN = 3
"""Nothing could be run here, and so nothing is known: never the same as fine."""

INTERRUPTED = 130
"""Ended from the keyboard, as shells number it."""
