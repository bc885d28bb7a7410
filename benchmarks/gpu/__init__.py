"""The sections of gpu_check.py, each a class with `steps`; `section.py` has what they share."""
