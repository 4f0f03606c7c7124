"""Training of drafter heads: the target writes its own text, the head learns the target's distribution."""
