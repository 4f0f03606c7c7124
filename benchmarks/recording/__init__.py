"""Recordings of labelled drafts: their format, and speculative rounds on one device that write them."""
