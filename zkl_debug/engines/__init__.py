"""The engines: the only part of zkl-debug that imports megatron, and the only part that knows how one is driven."""
