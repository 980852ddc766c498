"""The full ladder as data: one module per kind of switch."""
