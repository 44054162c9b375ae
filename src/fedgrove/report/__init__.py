"""Results as a person reads them: tables, several seeds together, progress, pages.

Other rooms build on this one; it imports none of them.
"""
