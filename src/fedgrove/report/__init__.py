"""Results for people: terminal tables, averages over seeds, progress, charts and HTML reports.

Other packages build on this one; it imports none of them.
"""
