"""The estimator study: recorded drafts served again, predicted by rules, and scored."""
