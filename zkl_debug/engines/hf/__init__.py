"""Hugging Face transformers: scoring forwards and ``generate`` with its key-value cache."""
