"""The stack: an ordered ladder of switches, from none to bitwise equality of scoring and generation."""

from zkl_debug.stack.switches import Switch, SwitchError, ladder, resolve, switch

__all__ = ["Switch", "SwitchError", "ladder", "resolve", "switch"]
