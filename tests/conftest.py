"""What holds for every test."""

from __future__ import annotations

import signal

# A shell lets what it starts in the background ignore SIGINT, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
