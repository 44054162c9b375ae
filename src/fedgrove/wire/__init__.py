"""Packets as bytes: codecs, messages, what receivers hold, and what it all costs."""
