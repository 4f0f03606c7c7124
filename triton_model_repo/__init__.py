"""Triton models over the runtime, and the command that serves them.

``models/`` is the model repository; its ``model.py`` files only name the classes of this package.
"""
