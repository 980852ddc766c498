"""Capture folders: HDF5 segments, a log that survives ``kill -9``, and a manifest. Knows nothing about models."""
