"""The demo: real training, real failures, and a table of what they cost."""
