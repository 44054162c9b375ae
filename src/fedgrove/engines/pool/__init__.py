"""The pool engine: one worker process per core."""
