"""Results as a person reads them: tables, several seeds together, progress, and the writer of pages.

Other rooms build on this one; it imports none of them.
"""
