"""Attaching to programs that know nothing of this package: found by what they import, captured as they run.

Nothing here imports torch or an engine until the program itself does.
"""
