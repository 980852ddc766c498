"""What ``zkl-debug bench`` measures: always against a plain baseline in the same run."""
