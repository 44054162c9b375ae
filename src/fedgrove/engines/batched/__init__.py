"""The batched engine: many clients stacked and trained as one."""
