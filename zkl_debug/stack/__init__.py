"""The stack: an ordered ladder of switches, from none to bitwise equality of scoring and generation."""

from zkl_debug.stack.switches import NotEffective, Switch, SwitchError, applied, ladder, resolve, switch, verify

__all__ = ["NotEffective", "Switch", "SwitchError", "applied", "ladder", "resolve", "switch", "verify"]
