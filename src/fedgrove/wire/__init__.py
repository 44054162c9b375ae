"""Packets as bytes: codecs, messages, what receivers know, and the bytes of messages."""
